// A gateway's client in Go: build/clients/go/generate [ADDRESS [PROMPT]], built by examples/clients/build.sh go.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/golang/protobuf/proto"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	pb "outrider/v1"
)

// stream prints a completion as it comes, and cancels it when it has `most` tokens.
func stream(client pb.GenerationServiceClient, prompt string, sampling *pb.SamplingParams, most int) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	request := &pb.GenerateRequest{Input: &pb.GenerateRequest_Text{Text: prompt}, Sampling: sampling}
	parts, err := client.Generate(ctx, request)
	for taken := 0; err == nil; {
		var part *pb.GenerateResponse
		if part, err = parts.Recv(); err != nil {
			break // io.EOF at the end
		}
		if taken += len(part.TokenIds); taken >= most {
			cancel()
			continue
		}
		fmt.Print(part.Text)
		if part.Usage != nil {
			fmt.Printf("\n%d tokens, %s\n", part.Usage.CompletionTokens, part.FinishReason)
		}
	}
	return err
}

func main() {
	address, prompt := "127.0.0.1:50050", "Once upon a time"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	if len(os.Args) > 2 {
		prompt = os.Args[2]
	}
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := pb.NewGenerationServiceClient(connection)
	greedy := func(tokens uint32) *pb.SamplingParams {
		return &pb.SamplingParams{Temperature: proto.Float64(0), MaxTokens: proto.Uint32(tokens)}
	}
	_ = stream(client, prompt, greedy(24), 1000)
	fmt.Println("stopped:", status.Code(stream(client, prompt, greedy(200), 1)))

	wrong := &pb.SamplingParams{Temperature: proto.Float64(-1), TopP: proto.Float64(3)}
	refusal := status.Convert(stream(client, prompt, wrong, 1000))
	fmt.Println("refused:", refusal.Code())
	for _, detail := range refusal.Details() {
		if bad, ok := detail.(*errdetails.BadRequest); ok {
			for _, violation := range bad.FieldViolations {
				fmt.Println(" ", violation.Field, violation.Description)
			}
		}
	}
}
