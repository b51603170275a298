/* Attention of new tokens to the keys and values of their own sequences. For any number of queries a
 * token's numbers come from the same operations in the same order: those that
 * `inference/embedded/cache_attention.py` describes.
 *
 * Letters: T new tokens, B sequences, G key-value heads, D numbers of a head. Strides are in numbers.
 */

#include <stdint.h>
#include <string.h>

#include "rows.h"
#include "threads.h"
#include "vectors.h"

#define KEY_BLOCK 32 /* positions that lie side by side: keys [slots, G, blocks, D, KEY_BLOCK] */

typedef struct {
  float *keys, *values; /* values [slots, G, places, D] */
  long groups, dim;
  long blocks, places; /* of each key-value head of a slot */
} cache;

typedef struct {
  const float *keys, *values; /* [G, blocks, D, KEY_BLOCK] and [G, length, D] */
  long blocks, length;
} prefix;

typedef struct {
  const cache *into;
  const float *k, *v; /* [T, G, D] */
  long k_stride, v_stride; /* between tokens */
  const int64_t *slots, *places; /* [T] */
  long tokens;
} keep_job;

static void keep_part(void *given) {
  const keep_job *job = given;
  const cache *into = job->into;
  long first, end, dim = into->dim;
  my_part(job->tokens, &first, &end);
  for (long token = first; token < end; token++)
    for (long group = 0; group < into->groups; group++) {
      long head = job->slots[token] * into->groups + group, place = job->places[token];
      const float *k = job->k + token * job->k_stride + group * dim;
      float *to = into->keys + (head * into->blocks + place / KEY_BLOCK) * dim * KEY_BLOCK;
      for (long i = 0; i < dim; i++) to[i * KEY_BLOCK + place % KEY_BLOCK] = k[i];
      memcpy(into->values + (head * into->places + place) * dim,
             job->v + token * job->v_stride + group * dim, (size_t)dim * sizeof(float));
    }
}

/* New keys and values into their slots. */
void keep(const cache *into, const float *k, long k_stride, const float *v, long v_stride,
          const int64_t *slots, const int64_t *places, long tokens, long threads) {
  keep_job job = {into, k, v, k_stride, v_stride, slots, places, tokens};
  in_parallel(keep_part, &job, threads, tokens * into->groups * into->dim * 2);
}

#define QUERIES_AT_ONCE (WIDTH / 2)
#define STRETCH 256 /* positions whose values are summed one after the other */

typedef struct {
  const cache *of;
  const float *q; /* [T, G * repeat, D] */
  float *out; /* as q */
  const int64_t *tokens; /* [B, queries]: the places of a sequence's new tokens in the row of T */
  const int64_t *slots, *lengths, *counts; /* [B]; keys in the slot; how many of `tokens` are real */
  const prefix *shared; /* what all sequences begin with, before their slots; or NULL */
  long batch, queries, repeat;
  long window, chunk; /* a query sees so many keys, or those of its chunk of positions; 0: all */
  const float *sinks; /* [G, repeat]: scores beside those of the keys; or NULL */
  float scaling;
} attend_job;

/* scores [n][width] of scaled queries q [n][dim] and the keys of whole blocks, `lo` to `hi`. */
INLINE void score(const int n, const float *q, long dim, const float *keys, long lo, long hi,
                  float *scores, long width) {
  for (long at = lo; at < hi; at += 2 * WIDTH) {
    const float *k = keys + at / KEY_BLOCK * dim * KEY_BLOCK + at % KEY_BLOCK;
    vec sum[QUERIES_AT_ONCE][2];
    UNROLL for (int i = 0; i < n; i++) sum[i][0] = sum[i][1] = all(0.0f);
    for (long d = 0; d < dim; d++, k += KEY_BLOCK) {
      vec k0 = load(k), k1 = load(k + WIDTH);
      UNROLL for (int i = 0; i < n; i++) {
        vec number = all(q[i * dim + d]);
        sum[i][0] = fma_(number, k0, sum[i][0]);
        sum[i][1] = fma_(number, k1, sum[i][1]);
      }
    }
    UNROLL for (int i = 0; i < n; i++) {
      store(scores + i * width + at, sum[i][0]);
      store(scores + i * width + at + WIDTH, sum[i][1]);
    }
  }
}

/* Where the values of one key-value head lie: those before `border` in the shared prefix. */
typedef struct {
  const float *before, *after;
  long border;
} values_of;

/* out [n][dim], `cols` vectors from d on: weights [n][width] times values from `lo` to `hi`. */
INLINE void weigh(const int n, const int cols, const float *weights, long width,
                  const values_of *values, long dim, long d, long lo, long hi, float *out) {
  vec whole[QUERIES_AT_ONCE][4], sum[QUERIES_AT_ONCE][4];
  UNROLL for (int i = 0; i < n; i++) UNROLL for (int c = 0; c < cols; c++) whole[i][c] = all(0.0f);
  for (long start = lo / STRETCH * STRETCH; start < hi; start += STRETCH) {
    long end = start + STRETCH < hi ? start + STRETCH : hi;
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int c = 0; c < cols; c++) sum[i][c] = all(0.0f);
    for (long p = start > lo ? start : lo; p < end;) {
      int before = p < values->border;
      const float *row = before ? values->before + p * dim : values->after + (p - values->border) * dim;
      long until = before && values->border < end ? values->border : end;
      for (row += d; p < until; p++, row += dim) {
        vec v[4];
        UNROLL for (int c = 0; c < cols; c++) v[c] = load(row + c * WIDTH);
        UNROLL for (int i = 0; i < n; i++) {
          vec weight = all(weights[i * width + p]);
          UNROLL for (int c = 0; c < cols; c++) sum[i][c] = fma_(weight, v[c], sum[i][c]);
        }
      }
    }
    UNROLL for (int i = 0; i < n; i++)
      UNROLL for (int c = 0; c < cols; c++) whole[i][c] = add(whole[i][c], sum[i][c]);
  }
  UNROLL for (int i = 0; i < n; i++)
    UNROLL for (int c = 0; c < cols; c++) store(out + i * dim + d + c * WIDTH, whole[i][c]);
}

static long in_blocks(long positions) { return (positions + KEY_BLOCK - 1) / KEY_BLOCK * KEY_BLOCK; }

/* Attention of `n` queries, from `first` on, of one sequence and key-value head. A place counts from
 * the beginning of the prefix, if there is one. */
INLINE void attend_to(const int n, const attend_job *job, long sequence, long group, long first) {
  const cache *of = job->of;
  const prefix *shared = job->shared;
  long dim = of->dim, head = job->slots[sequence] * of->groups + group, lo = 0, hi = 0;
  long border = shared ? shared->length : 0;
  long begins[QUERIES_AT_ONCE], ends[QUERIES_AT_ONCE], places[QUERIES_AT_ONCE];
  for (int i = 0; i < n; i++) {
    long query = (first + i) / job->repeat, token = job->tokens[sequence * job->queries + query];
    places[i] = ((token * of->groups + group) * job->repeat + (first + i) % job->repeat) * dim;
    ends[i] = border + job->lengths[sequence] - job->counts[sequence] + query + 1;
    begins[i] = job->window && ends[i] > job->window ? ends[i] - job->window : 0;
    if (job->chunk) begins[i] = (ends[i] - 1) / job->chunk * job->chunk;
    lo = i == 0 || begins[i] < lo ? begins[i] : lo;
    hi = ends[i] > hi ? ends[i] : hi;
  }
  long low = lo / KEY_BLOCK * KEY_BLOCK, width = in_blocks(border) + in_blocks(hi - border);
  float *scores = scratch(n * width + 2 * n * dim), *scaled = scores + n * width;
  float *out = scaled + n * dim;
  for (int i = 0; i < n; i++)
    for (long d = 0; d < dim; d++) scaled[i * dim + d] = job->q[places[i] + d] * job->scaling;
  if (low < border)
    score(n, scaled, dim, shared->keys + group * shared->blocks * dim * KEY_BLOCK, low,
          in_blocks(border), scores, width);
  long own = low > border ? (low - border) / KEY_BLOCK * KEY_BLOCK : 0;
  score(n, scaled, dim, of->keys + head * of->blocks * dim * KEY_BLOCK, own,
        in_blocks(hi - border), scores + border, width);
  long high = (hi + WIDTH - 1) / WIDTH * WIDTH;
  for (int i = 0; i < n; i++) {
    float *row = scores + i * width;
    for (long p = low; p < begins[i]; p++) row[p] = -INFINITY;
    for (long p = ends[i]; p < high; p++) row[p] = -INFINITY;
    const float *sink = job->sinks ? job->sinks + group * job->repeat + (first + i) % job->repeat : NULL;
    softmax(row + low, high - low, sink);
  }
  values_of values = {shared ? shared->values + group * border * dim : NULL,
                      of->values + head * of->places * dim, border};
  long d = 0;
  if (n <= QUERIES_AT_ONCE / 2)
    for (; d + 4 * WIDTH <= dim; d += 4 * WIDTH)
      weigh(n, 4, scores, width, &values, dim, d, lo, hi, out);
  for (; d + 2 * WIDTH <= dim; d += 2 * WIDTH)
    weigh(n, 2, scores, width, &values, dim, d, lo, hi, out);
  for (; d < dim; d += WIDTH) weigh(n, 1, scores, width, &values, dim, d, lo, hi, out);
  for (int i = 0; i < n; i++)
    memcpy(job->out + places[i], out + i * dim, (size_t)dim * sizeof(float));
}

static void attend_part(void *given) {
  const attend_job *job = given;
  long groups = job->of->groups, most = job->queries * job->repeat, first, end;
  long tiles = (most + QUERIES_AT_ONCE - 1) / QUERIES_AT_ONCE;
  my_part(job->batch * groups * tiles, &first, &end);
  for (long at = first; at < end; at++) {
    long i = at % tiles, sequence = at / tiles / groups, group = at / tiles % groups;
    long num = job->counts[sequence] * job->repeat, begin = i * num / tiles;
    switch ((i + 1) * num / tiles - begin) {
#define CASE(count) \
  case count: \
    attend_to(count, job, sequence, group, begin); \
    break;
      CASE(1) CASE(2) CASE(3) CASE(4)
#if QUERIES_AT_ONCE > 4
      CASE(5) CASE(6) CASE(7) CASE(8)
#endif
#undef CASE
    }
  }
}

/* Softmax attention of the new tokens of some sequences, each to the keys of its own up to itself.
 * D is a multiple of 16. */
void attend(const cache *of, const float *q, const int64_t *tokens, const int64_t *slots,
            const int64_t *lengths, const int64_t *counts, const prefix *shared, long batch,
            long queries, long repeat, float scaling, long window, long chunk, const float *sinks,
            float *out, long threads) {
  attend_job job = {of,     q,     out,     tokens, slots,  lengths, counts,
                    shared, batch, queries, repeat, window, chunk,   sinks, scaling};
  in_parallel(attend_part, &job, threads, batch * of->groups * of->dim * queries * repeat * 32);
}
