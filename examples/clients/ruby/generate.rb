# A gateway's client in Ruby: ruby generate.rb [ADDRESS [PROMPT]], with the stubs of examples/clients/build.sh ruby.
$LOAD_PATH.unshift(ENV.fetch('OUT', File.join(__dir__, '../../../build/clients')) + '/ruby')
require 'grpc'
require 'google/protobuf/well_known_types'
require 'google/rpc/error_details_pb'
require 'outrider/v1/generation_services_pb'
V1 = Outrider::V1

address = ARGV.fetch(0, '127.0.0.1:50050')
prompt = ARGV.fetch(1, 'Once upon a time')
$stdout.sync = true
client = V1::GenerationService::Stub.new(address, :this_channel_is_insecure, timeout: 60)
request = ->(**sampling) { V1::GenerateRequest.new(text: prompt, sampling: V1::SamplingParams.new(**sampling)) }

client.generate(request.(temperature: 0, max_tokens: 24)).each do |part|
  print part.text
  puts "\n#{part.usage.completion_tokens} tokens, #{part.finish_reason}" if part.usage
end

# An operation can be cancelled, here at its first tokens; its parts then end with an error.
operation = client.generate(request.(temperature: 0, max_tokens: 200), return_op: true)
begin
  operation.execute.each { operation.cancel }
rescue GRPC::Cancelled => e
  puts "stopped: code #{e.code}" # 1: CANCELLED
end

begin
  client.generate(request.(temperature: -1, top_p: 3)).each { raise 'not reached' }
rescue GRPC::BadStatus => e
  puts "refused: code #{e.code}" # 3: INVALID_ARGUMENT
  details = e.to_rpc_status.details.select { |detail| detail.is(Google::Rpc::BadRequest) }
  details.flat_map { |detail| detail.unpack(Google::Rpc::BadRequest).field_violations.to_a }
         .each { |violation| puts "  #{violation.field} #{violation.description}" }
end
