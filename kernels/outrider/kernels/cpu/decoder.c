/* A pass of a decoder (Llama, Mistral, Qwen, Gemma, Phi, and mixtures of experts) over a ragged batch, in float32, on threads that stay together
   from the first layer to the last. Every row's bits depend on its own sequence alone: on no other row, no tiling, no
   number of threads. */

#include <math.h>
#include <omp.h>
#include <string.h>

#include "attention.h"
#include "mixture.h"
#include "rows.h"

typedef struct {
    Matrix qkv, output;
    Matrix gate, up, down;                /* of the feed-forward; nothing where experts are */
    const Mixture *mixture;               /* or none */
    const float *input_norm, *post_norm;  /* [hidden]: before attention, before the gate */
    const float *output_norm, *down_norm; /* [hidden], or none: of what is then added to the residual stream */
    const float *qk_norm;                 /* [heads + kv_heads][head_dim], or none */
    int64_t norms_all_heads;              /* queries as one vector, and keys, and not head by head */
    const float *sinks;                   /* [heads], or none */
    const float *cos, *sin;               /* [positions][head_dim]; the first half of the sines is negated */
    int64_t window;
} Layer;

typedef struct {
    int64_t num_layers, hidden, intermediate, heads, kv_heads, head_dim;
    int64_t gate_is_gelu;                     /* its approximation with tanh; else silu */
    float eps, scale, softcap, logit_softcap; /* softcap 0: none */
    const Layer *layers;
    const void *embeddings;                   /* [num_embeddings][hidden] float32, bfloat16, float16, or a packed Matrix */
    int64_t num_embeddings, embeddings_kind;
    float embedding_scale;
    const float *norm; /* [hidden] */
    Matrix head;
    int64_t has_tiles; /* some matrix */
} Decoder;

typedef struct {
    int64_t rows, sequences, table_width, longest, block_size; /* longest context */
    const int64_t *positions, *slots;                          /* [rows] */
    const int64_t *tables;                                     /* [sequences][table_width] */
    const int64_t *starts, *contexts;                          /* [sequences + 1], [sequences] */
    const int32_t *parents; /* [rows] or none: of a drafted tree's rows, counted from the sequence's first row */
    float *const *keys, *const *values;                        /* [layers]: [blocks][block_size][kv_heads][head_dim] */
    const Adapters *adapters;                                  /* or none, where no row has one */
} Rows;

/* Floats for one query's scores. */
static int64_t scores_size(int64_t keys) { return (keys + 2 * LANES) / LANES * LANES; }

/* hidden += the norm of x; both [rows][dim]. */
static void add_normed(Thread *thread, const float *x, const float *weight, int64_t rows, int64_t dim, float eps,
                       float *hidden) {
    for (CLAIM(row, rows)) {
        const float *from = x + row * dim;
        floats factor = all(rms_factor(from, dim, eps));
        float *to = hidden + row * dim;
        for (int64_t at = 0; at < dim; at += LANES)
            store(to + at, load(to + at) + load(from + at) * factor * load(weight + at));
    }
    meet(thread);
}

/* x: placed. hidden += the product, or its norm; `spare` has room for the product. */
static void add_product(Thread *thread, const Matrix *matrix, const float *norm, float eps, const float *x,
                        int64_t rows, const Change *change, float *spare, float *hidden, const Matrix *next) {
    product(thread, matrix, x, rows, !norm, change, norm ? spare : hidden, next);
    if (norm) add_normed(thread, spare, norm, rows, matrix->outputs, eps, hidden);
}

/* x: placed; out: activated(gate) * up, placed. */
static void gated(Thread *thread, const Layer *layer, int64_t is_gelu, const float *x, int64_t rows,
                  const Change *change, float *out) {
    Results *gates = thread->results, *ups = gates + rows;
    int64_t outputs = layer->gate.outputs;
    Change gate = {change->adapters, change->layer, GATE, 1}, up = {change->adapters, change->layer, UP, 1};
    if (change->adapters) multiply_down(thread, change, rows, layer->gate.inputs);
    for (CLAIM(panel, num_panels(&layer->gate))) {
        int64_t first = panel * PANEL, width = outputs - first < PANEL ? outputs - first : PANEL;
        product_panel(&layer->gate, panel, x, rows, gates);
        product_panel(&layer->up, panel, x, rows, ups);
        if (change->adapters) {
            add_low_rank(&gate, panel, outputs, rows, gates);
            add_low_rank(&up, panel, outputs, rows, ups);
        }
        for (int64_t row = 0; row < rows; row++) {
            for (int64_t at = 0; at < PANEL; at += LANES)
                store(gates[row] + at, activated(load(gates[row] + at), is_gelu) * load(ups[row] + at));
            place(&layer->down, rows, row, first, width, gates[row], out);
            keep_input(change->adapters, outputs, row, first, width, gates[row]);
        }
    }
    look_ahead(thread, &layer->down);
    meet(thread);
}

/* qkv: [rows][heads + 2 kv_heads][head_dim]. Norms and turns queries and keys where they are, and stores keys and
   values. */
static void turn_and_store(Thread *thread, const Decoder *decoder, const Layer *layer, const Rows *batch, float *qkv,
                           float *keys, float *values) {
    int64_t dim = decoder->head_dim, turned = decoder->heads + decoder->kv_heads, half = dim / 2;
    int64_t width = (turned + decoder->kv_heads) * dim, kept = decoder->kv_heads * dim;
    float head[MOST_DIM];
    for (CLAIM(row, batch->rows)) {
        float *own = qkv + row * width;
        const float *cosine = layer->cos + batch->positions[row] * dim;
        const float *sine = layer->sin + batch->positions[row] * dim;
        float of_queries = 1.0f, of_keys = 1.0f;
        if (layer->norms_all_heads) {
            of_queries = rms_factor(own, decoder->heads * dim, decoder->eps);
            of_keys = rms_factor(own + decoder->heads * dim, kept, decoder->eps);
        }
        for (int64_t index = 0; index < turned; index++) {
            float *at = own + index * dim;
            memcpy(head, at, (size_t)dim * sizeof(float));
            if (layer->qk_norm) {
                float factor = index < decoder->heads ? of_queries : of_keys;
                if (!layer->norms_all_heads) factor = rms_factor(at, dim, decoder->eps);
                for (int64_t i = 0; i < dim; i++) head[i] = at[i] * factor * layer->qk_norm[index * dim + i];
            }
            for (int64_t i = 0; i < half; i++) at[i] = head[i] * cosine[i] + head[i + half] * sine[i];
            for (int64_t i = half; i < dim; i++) at[i] = head[i] * cosine[i] + head[i - half] * sine[i];
        }
        memcpy(keys + batch->slots[row] * kept, own + decoder->heads * dim, (size_t)kept * sizeof(float));
        memcpy(values + batch->slots[row] * kept, own + turned * dim, (size_t)kept * sizeof(float));
    }
    meet(thread);
}

#define SHARED_ROWS 32 /* of a sequence, whose keys one thread reads once, where there is work for all threads */

#define CHAIN -2     /* parent of a row that sees all rows before it */
#define TREE_ROWS 64 /* most rows of a sequence that brings a tree */

/* Where the keys of a tree's row lie: those of its ancestors, top down, and its own come in order of position. path has
   room for TREE_ROWS. */
static Places tree_places(const Rows *batch, int64_t sequence, int64_t row, int64_t *path) {
    int64_t start = batch->starts[sequence], climbed[TREE_ROWS], count = 0;
    for (int64_t node = row; node >= start && count < TREE_ROWS; node = start + batch->parents[node])
        climbed[count++] = batch->slots[node];
    for (int64_t at = 0; at < count; at++) path[at] = climbed[count - 1 - at];
    return (Places){batch->tables + sequence * batch->table_width, batch->positions[row] + 1 - count, path};
}

static int brings_tree(const Rows *batch, int64_t sequence) {
    return batch->parents && batch->parents[batch->starts[sequence]] != CHAIN;
}

/* Attention of a sequence's rows from `row` to `end`, of a tree one, for the query heads of one key-value head. out: placed. */
static void attend_rows(Thread *thread, const AttentionShape *shape, const Layer *layer, const Rows *batch,
                        int64_t sequence, int64_t kv_head, int64_t row, int64_t end, const float *qkv,
                        const float *keys, const float *values, float *out) {
    int64_t dim = shape->head_dim, group = shape->heads / shape->kv_heads, room = scores_size(batch->longest);
    int64_t width = (shape->heads + 2 * shape->kv_heads) * dim, heads = (end - row) * group;
    int64_t after = batch->contexts[sequence] - batch->starts[sequence + 1] + 1; /* a row's position and 1, less row */
    int64_t path[TREE_ROWS];
    Places places = {batch->tables + sequence * batch->table_width, batch->longest, NULL};
    if (brings_tree(batch, sequence)) {
        places = tree_places(batch, sequence, row, path);
        after = batch->positions[row] + 1 - row;
    }
    float attended[MOST_QUERIES][MOST_DIM];
    for (int64_t done = 0; done < heads; done += MOST_QUERIES) {
        int count = heads - done < MOST_QUERIES ? (int)(heads - done) : MOST_QUERIES;
        Query queries[MOST_QUERIES];
        for (int64_t index = 0; index < count; index++) {
            int64_t at = row + (done + index) / group, head = kv_head * group + (done + index) % group;
            int64_t seen = at + after, first = shape->window && seen > shape->window ? seen - shape->window : 0;
            const float *vector = qkv + at * width + head * dim;
            float sink = layer->sinks ? layer->sinks[head] : -INFINITY;
            queries[index] = (Query){vector, first, seen, thread->scores + index * room, 0.0f, attended[index], sink};
        }
        attend_together(count, shape, queries, keys + kv_head * dim, values + kv_head * dim, &places);
        for (int64_t index = 0; index < count; index++) {
            int64_t at = row + (done + index) / group, head = kv_head * group + (done + index) % group;
            place(&layer->output, batch->rows, at, head * dim, dim, attended[index], out);
            keep_input(batch->adapters, shape->heads * dim, at, head * dim, dim, attended[index]);
        }
    }
}

/* out: placed. Pieces are taken in their order, one by one: late rows have most keys. */
static void attention(Thread *thread, const Decoder *decoder, const Layer *layer, const Rows *batch, const float *qkv,
                      const float *keys, const float *values, float *out) {
    AttentionShape shape = {decoder->heads, decoder->kv_heads, decoder->head_dim, batch->block_size,
                            layer->window,  decoder->scale,    decoder->softcap};
    int64_t together = batch->sequences * shape.kv_heads < 4 * thread->size ? 1 : SHARED_ROWS;
    int64_t task = 0, own = take(thread, 0);
    for (int64_t sequence = 0; sequence < batch->sequences; sequence++) {
        int64_t last = batch->starts[sequence + 1], step = brings_tree(batch, sequence) ? 1 : together;
        for (int64_t kv_head = 0; kv_head < shape.kv_heads; kv_head++)
            for (int64_t row = batch->starts[sequence]; row < last; row += step) {
                if (task++ != own) continue;
                int64_t end = row + step < last ? row + step : last;
                attend_rows(thread, &shape, layer, batch, sequence, kv_head, row, end, qkv, keys, values, out);
                own = take(thread, 0);
            }
    }
    meet(thread);
}

/* The embedding of an id. out: [hidden] */
static void look_up_embedding(const Decoder *decoder, int64_t id, float *out) {
    if (decoder->embeddings_kind == PACKED) {
        const Matrix *matrix = decoder->embeddings;
        const char *panel = (const char *)matrix->panels + id / PANEL * panel_bytes(matrix);
        unpack_output(matrix->packing, panel, matrix->inputs, id % PANEL, out);
        return;
    }
    for (int64_t at = 0; at < decoder->hidden; at += LANES)
        store(out + at, weights_at((int)decoder->embeddings_kind, decoder->embeddings, id * decoder->hidden + at));
}

/* hidden: [rows][hidden]. */
static void embed(Thread *thread, const Decoder *decoder, const int64_t *ids, int64_t rows, float *hidden) {
    for (CLAIM(row, rows)) {
        float *to = hidden + row * decoder->hidden;
        look_up_embedding(decoder, ids[row], to);
        for (int64_t at = 0; at < decoder->hidden; at += LANES)
            store(to + at, load(to + at) * all(decoder->embedding_scale));
    }
    meet(thread);
}

/* The layers whose hidden states are wanted: what enters them, or for the number of layers the last norm's. */
typedef struct {
    const int64_t *layers; /* [count] */
    int64_t count;
    float *states; /* [rows][count][hidden] */
} Taps;

/* Keeps the rows of hidden, which enter a layer, or their norm, if they are wanted. */
static void tap(Thread *thread, const Decoder *decoder, const Taps *taps, int64_t layer, int64_t rows,
                const float *hidden) {
    int64_t dim = decoder->hidden;
    for (int64_t index = 0; index < taps->count; index++) {
        if (taps->layers[index] != layer) continue;
        for (CLAIM(row, rows)) {
            const float *from = hidden + row * dim;
            float *to = taps->states + (row * taps->count + index) * dim;
            floats factor = all(layer < decoder->num_layers ? 1.0f : rms_factor(from, dim, decoder->eps));
            for (int64_t at = 0; at < dim; at += LANES) {
                floats weight = layer < decoder->num_layers ? all(1.0f) : load(decoder->norm + at);
                store(to + at, load(from + at) * factor * weight);
            }
        }
        meet(thread);
    }
}

static void run_layers(Thread *thread, const Decoder *decoder, const Rows *batch, float *hidden, float *scratch,
                       const Taps *taps) {
    int64_t rows = batch->rows, width = decoder->heads * decoder->head_dim;
    float *normed = scratch, *attended = normed + placed_size(decoder->hidden, rows);
    float *wide = attended + placed_size(width, rows), *qkv = wide + placed_size(decoder->intermediate, rows);
    float *spare = qkv + rows * (width + 2 * decoder->kv_heads * decoder->head_dim); /* [rows][hidden] */
    const Adapters *adapters = batch->adapters;
    for (int64_t index = 0; index < decoder->num_layers; index++) {
        const Layer *layer = decoder->layers + index;
        const Matrix *next = index + 1 < decoder->num_layers ? &layer[1].qkv : &decoder->head;
        float *keys = batch->keys[index], *values = batch->values[index];
        tap(thread, decoder, taps, index, rows, hidden);
        Change of_qkv = {adapters, index, QUERY, 3}, of_output = {adapters, index, OUTPUT, 1};
        Change of_gate_up = {adapters, index, GATE, 2}, of_down = {adapters, index, DOWN, 1};
        norm_rows(thread, hidden, NULL, layer->input_norm, rows, decoder->eps, &layer->qkv, adapters, normed);
        product(thread, &layer->qkv, normed, rows, 0, &of_qkv, qkv, &layer->output);
        turn_and_store(thread, decoder, layer, batch, qkv, keys, values);
        attention(thread, decoder, layer, batch, qkv, keys, values, attended);
        add_product(thread, &layer->output, layer->output_norm, decoder->eps, attended, rows, &of_output, spare, hidden,
                    layer->mixture ? &layer->mixture->router : &layer->gate);
        if (layer->mixture) {
            mix(thread, layer->mixture, decoder->gate_is_gelu, layer->post_norm, decoder->eps, rows, hidden, normed,
                spare, next);
            continue;
        }
        norm_rows(thread, hidden, NULL, layer->post_norm, rows, decoder->eps, &layer->gate, adapters, normed);
        gated(thread, layer, decoder->gate_is_gelu, normed, rows, &of_gate_up, wide);
        add_product(thread, &layer->down, layer->down_norm, decoder->eps, wide, rows, &of_down, spare, hidden, next);
    }
    tap(thread, decoder, taps, decoder->num_layers, rows, hidden);
}

/* Changes `count` numbers, any number of them. */
static void cap_all(Thread *thread, float *x, int64_t count, float cap) {
    for (CLAIM(part, (count + LANES - 1) / LANES)) {
        int64_t at = part * LANES, size = count - at < LANES ? count - at : LANES;
        float lanes[LANES] = {0};
        memcpy(lanes, x + at, (size_t)size * sizeof(float));
        store(lanes, soft_cap(load(lanes), cap));
        memcpy(x + at, lanes, (size_t)size * sizeof(float));
    }
    meet(thread);
}

/* scratch: room for the rows, placed. */
static void run_head(Thread *thread, const Decoder *decoder, const float *hidden, const int64_t *logit_rows,
                     int64_t wanted, float *scratch, float *logits) {
    norm_rows(thread, hidden, logit_rows, decoder->norm, wanted, decoder->eps, &decoder->head, NULL, scratch);
    product(thread, &decoder->head, scratch, wanted, 0, &UNCHANGED, logits, &decoder->layers[0].qkv);
    if (decoder->logit_softcap != 0.0f)
        cap_all(thread, logits, wanted * decoder->head.outputs, decoder->logit_softcap);
}

/* Floats of a thread's own scratch: the results of two panels, and the scores of some queries. */
static int64_t own_scratch(int64_t rows, int64_t keys) {
    return 2 * rows * PANEL + MOST_QUERIES * scores_size(keys);
}

/* Floats of the inputs of all products of a layer. */
static int64_t inputs_scratch(const Decoder *decoder, int64_t rows) {
    return placed_size(decoder->hidden, rows) + placed_size(decoder->heads * decoder->head_dim, rows) +
           placed_size(decoder->intermediate, rows);
}

/* Floats that the functions below need as scratch. */
int64_t decoder_scratch(const Decoder *decoder, int64_t rows, int64_t keys, int64_t threads) {
    int64_t qkv = (decoder->heads + 2 * decoder->kv_heads) * decoder->head_dim;
    int64_t outputs = rows * (qkv + 2 * decoder->hidden + decoder->intermediate), mixed = 0;
    for (int64_t index = 0; index < decoder->num_layers; index++) {
        const Mixture *mixture = decoder->layers[index].mixture;
        int64_t size = mixture ? mixture_scratch(mixture, rows) : 0;
        mixed = size > mixed ? size : mixed;
    }
    return inputs_scratch(decoder, rows) + outputs + mixed + threads * own_scratch(rows, keys);
}

static Thread join(Team *team, int64_t rows, int64_t keys, float *scratch) {
    Thread thread = {.index = omp_get_thread_num(), .size = omp_get_num_threads(), .team = team};
    thread.results = (Results *)(scratch + thread.index * own_scratch(rows, keys));
    thread.scores = (float *)(thread.results + 2 * rows);
    return thread;
}

/* ids: [rows]. logits: [wanted][vocab], of the rows that `logit_rows` names; a chunk of a prompt wants none. tapped:
   [num_tapped], layers whose hidden states are written to states [rows][num_tapped][hidden]. Returns how many experts
   the rows went to, over all layers; -1 for an id that has no embedding. */
int64_t decoder_forward(const Decoder *decoder, const Rows *batch, const int64_t *ids, const int64_t *logit_rows,
                        int64_t wanted, float *logits, float *scratch, int64_t threads, const int64_t *tapped,
                        int64_t num_tapped, float *states) {
    for (int64_t row = 0; row < batch->rows; row++)
        if (ids[row] < 0 || ids[row] >= decoder->num_embeddings) return -1;
    Team team = {0};
    Taps taps = {tapped, num_tapped, states};
    float *hidden = scratch + threads * own_scratch(batch->rows, batch->longest);
    float *shared = hidden + batch->rows * decoder->hidden;
#pragma omp parallel num_threads((int)(threads < MOST_THREADS ? threads : MOST_THREADS))
    {
        Thread thread = join(&team, batch->rows, batch->longest, scratch);
        if (decoder->has_tiles) tiles_begin();
        embed(&thread, decoder, ids, batch->rows, hidden);
        run_layers(&thread, decoder, batch, hidden, shared, &taps);
        if (wanted) run_head(&thread, decoder, hidden, logit_rows, wanted, shared, logits);
        if (decoder->has_tiles) tiles_end();
    }
    return team.num_woken;
}

/* The products of a pass alone, on whatever `scratch` holds: what the pass would cost if it were nothing else. */
void decoder_products(const Decoder *decoder, int64_t rows, float *logits, float *scratch, int64_t threads) {
    Team team = {0};
    float *in = scratch + threads * own_scratch(rows, 0), *out = in + inputs_scratch(decoder, rows);
#pragma omp parallel num_threads((int)(threads < MOST_THREADS ? threads : MOST_THREADS))
    {
        Thread thread = join(&team, rows, 0, scratch);
        if (decoder->has_tiles) tiles_begin();
        for (int64_t index = 0; index < decoder->num_layers; index++) {
            const Layer *layer = decoder->layers + index;
            const Matrix *matrices[] = {&layer->qkv, &layer->output, &layer->gate, &layer->up, &layer->down};
            for (int at = 0; at < (layer->mixture ? 2 : 5); at++)
                product(&thread, matrices[at], in, rows, 0, &UNCHANGED, out, matrices[at]);
            if (layer->mixture) mixture_products(&thread, layer->mixture, in, rows, out);
        }
        product(&thread, &decoder->head, in, rows, 0, &UNCHANGED, logits, &decoder->head);
        if (decoder->has_tiles) tiles_end();
    }
}

/* Floats that `matrix_product` needs as scratch. */
int64_t matrix_scratch(const Matrix *matrix, int64_t rows, int64_t threads) {
    return placed_size(matrix->inputs, rows) + threads * own_scratch(rows, 0);
}

static void place_rows(Thread *thread, const Matrix *matrix, const float *x, int64_t rows, float *out) {
    for (CLAIM(row, rows)) place(matrix, rows, row, 0, matrix->inputs, x + row * matrix->inputs, out);
    meet(thread);
}

/* One product by itself. x: [rows][inputs]; out: [rows][outputs]. */
void matrix_product(const Matrix *matrix, const float *x, int64_t rows, float *out, float *scratch, int64_t threads) {
    Team team = {0};
    float *placed = scratch + threads * own_scratch(rows, 0);
#pragma omp parallel num_threads((int)(threads < MOST_THREADS ? threads : MOST_THREADS))
    {
        Thread thread = join(&team, rows, 0, scratch);
        if (matrix->kind == TILES) tiles_begin();
        place_rows(&thread, matrix, x, rows, placed);
        product(&thread, matrix, placed, rows, 0, &UNCHANGED, out, matrix);
        if (matrix->kind == TILES) tiles_end();
    }
}
