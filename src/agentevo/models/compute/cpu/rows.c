/* What is computed row by row, or number by number: norm, gate, softmax, rotary positions. */

#include "rows.h"

#include <string.h>

#include "threads.h"
#include "vectors.h"

typedef struct {
  const float *x, *with;
  float *out;
  long rows, width;
  float epsilon;
} rows_job;

static void rms_norm_part(void *given) {
  const rows_job *job = given;
  long first, end, whole = job->width / WIDTH * WIDTH;
  my_part(job->rows, &first, &end);
  for (long row = first; row < end; row++) {
    const float *x = job->x + row * job->width;
    float *out = job->out + row * job->width;
    vec squares = all(0.0f);
    for (long i = 0; i < whole; i += WIDTH) squares = fma_(load(x + i), load(x + i), squares);
    float sum = sum_of(squares);
    for (long i = whole; i < job->width; i++) sum += x[i] * x[i];
    float scale = 1.0f / sqrtf(sum / (float)job->width + job->epsilon);
    for (long i = 0; i < job->width; i++) out[i] = x[i] * scale;
  }
}

/* out [rows, width] = x / sqrt(mean(x^2) + epsilon) of each row. */
void rms_norm(const float *x, long rows, long width, float epsilon, float *out, long threads) {
  rows_job job = {x, NULL, out, rows, width, epsilon};
  in_parallel(rms_norm_part, &job, threads, rows * width);
}

static void gate_part(void *given) {
  const rows_job *job = given;
  long first, end;
  my_part(job->width / WIDTH, &first, &end);
  for (long i = first * WIDTH; i < end * WIDTH; i += WIDTH) {
    vec x = load(job->x + i);
    vec sigmoid_below = add(all(1.0f), exponential(sub(all(0.0f), x)));
    store(job->out + i, mul(divide(x, sigmoid_below), load(job->with + i)));
  }
}

/* out = x * sigmoid(x) * times, of `numbers` numbers, a multiple of 16. */
void gate(const float *x, const float *times, long numbers, float *out, long threads) {
  rows_job job = {x, times, out, 1, numbers, 0};
  in_parallel(gate_part, &job, threads, numbers);
}

void softmax(float *scores, long length, const float *sink) {
  long whole = length / WIDTH * WIDTH;
  float tail[WIDTH];
  for (long i = 0; i < WIDTH; i++) tail[i] = whole + i < length ? scores[whole + i] : -INFINITY;
  vec largest = load(tail);
  for (long i = 0; i < whole; i += WIDTH) largest = max_(largest, load(scores + i));
  if (sink) largest = max_(largest, all(*sink));
  vec top = all(largest_of(largest)), sum = all(0.0f);
  for (long i = 0; i < whole; i += WIDTH) {
    vec e = exponential(sub(load(scores + i), top));
    store(scores + i, e);
    sum = add(sum, e);
  }
  vec last = exponential(sub(load(tail), top));
  vec total = all(sum_of(add(sum, last)));
  if (sink) total = add(total, exponential(sub(all(*sink), top)));
  for (long i = 0; i < whole; i += WIDTH) store(scores + i, divide(load(scores + i), total));
  store(tail, divide(last, total));
  memcpy(scores + whole, tail, (size_t)(length - whole) * sizeof(float));
}

static void softmax_part(void *given) {
  const rows_job *job = given;
  long first, end;
  my_part(job->rows, &first, &end);
  for (long row = first; row < end; row++) softmax(job->out + row * job->width, job->width, NULL);
}

/* Softmax of each row of scores [rows, width], in place. Every row has a number above -inf. */
void softmax_rows(float *scores, long rows, long width, long threads) {
  rows_job job = {NULL, NULL, scores, rows, width, 0};
  in_parallel(softmax_part, &job, threads, rows * width);
}

typedef struct {
  const float *heads; /* [T, stride]: query heads, key heads, and what else lies in a row */
  const float *cos, *sin; /* [T, D] */
  float *q, *k; /* [T, H, D] and [T, G, D] */
  long tokens, stride, num_q, num_k, dim;
} rotate_job;

static void rotate_part(void *given) {
  const rotate_job *job = given;
  long first, end, half = job->dim / 2;
  my_part(job->tokens, &first, &end);
  for (long token = first; token < end; token++) {
    const float *cos = job->cos + token * job->dim, *sin = job->sin + token * job->dim;
    for (long head = 0; head < job->num_q + job->num_k; head++) {
      const float *from = job->heads + token * job->stride + head * job->dim;
      float *to = head < job->num_q ? job->q + (token * job->num_q + head) * job->dim
                                    : job->k + (token * job->num_k + head - job->num_q) * job->dim;
      for (long i = 0; i < half; i++) {
        to[i] = from[i] * cos[i] - from[half + i] * sin[i];
        to[half + i] = from[half + i] * cos[half + i] + from[i] * sin[half + i];
      }
    }
  }
}

/* Rotary positions (arXiv 2104.09864) of query and key heads. */
void rotate(const float *heads, long tokens, long stride, long num_q, long num_k, long dim,
            const float *cos, const float *sin, float *q, float *k, long threads) {
  rotate_job job = {heads, cos, sin, q, k, tokens, stride, num_q, num_k, dim};
  in_parallel(rotate_part, &job, threads, tokens * (num_q + num_k) * dim);
}
