/* Products of few rows and a packed matrix. Every output is summed over the inputs by the same
 * operations in the same order for any number of rows: those of oneDNN's kernels for many. */

#include <string.h>

#include "threads.h"
#include "vectors.h"

#define BLOCK 64 /* outputs that lie together: packed [outputs / BLOCK, inputs, BLOCK] */
#define VECS (BLOCK / WIDTH)
#define CHUNK 64 /* inputs whose weights all rows meet while these are in the first cache */
#define AHEAD (2 * CHUNK * BLOCK)

typedef struct {
  const float *packed, *bias; /* bias may be NULL */
  long inputs, outputs;
  long stretch; /* inputs that are summed one after the other; the sums are added up then */
} matrix;

typedef struct {
  const matrix *weight;
  const float *x; /* [rows, inputs] */
  const float *plus; /* [rows, outputs] or NULL */
  float *out; /* [rows, outputs] */
  long rows;
} product_job;

/* sums [ROWS_AT_ONCE][BLOCK] += x [n][rows] times weights [n][BLOCK], of `cols` vectors from `col`. */
INLINE void tile(const int rows, const int cols, const float *x, const float *w, long n,
                 float *sums, int col, int begins) {
  vec sum[ROWS_AT_ONCE][4];
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int c = 0; c < cols; c++)
      sum[r][c] = begins ? all(0.0f) : load(sums + r * BLOCK + (col + c) * WIDTH);
  w += col * WIDTH;
  for (long k = 0; k < n; k++, w += BLOCK, x += rows) {
    vec b[4];
    UNROLL for (int c = 0; c < cols; c++) {
      b[c] = load(w + c * WIDTH);
      _mm_prefetch((const char *)(w + AHEAD + c * WIDTH), _MM_HINT_T1);
    }
    UNROLL for (int r = 0; r < rows; r++) {
      vec a = all(x[r]);
      UNROLL for (int c = 0; c < cols; c++) sum[r][c] = fma_(a, b[c], sum[r][c]);
    }
  }
  UNROLL for (int r = 0; r < rows; r++)
    UNROLL for (int c = 0; c < cols; c++) store(sums + r * BLOCK + (col + c) * WIDTH, sum[r][c]);
}

INLINE void tiles(const int rows, const float *x, const float *w, long n, float *sums, int col,
                  int end, int begins) {
  const int wide = rows * 4 <= ACCUMULATORS ? 4 : rows * 2 <= ACCUMULATORS ? 2 : 1;
  for (; wide == 4 && col + 4 <= end; col += 4) tile(rows, 4, x, w, n, sums, col, begins);
  for (; wide >= 2 && col + 2 <= end; col += 2) tile(rows, 2, x, w, n, sums, col, begins);
  for (; col < end; col++) tile(rows, 1, x, w, n, sums, col, begins);
}

static void any_tiles(long rows, const float *x, const float *w, long n, float *sums, int col,
                      int end, int begins) {
  switch (rows) {
#define CASE(count) \
  case count: \
    tiles(count, x, w, n, sums, col, end, begins); \
    break;
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
    CASE(9) CASE(10) CASE(11) CASE(12)
#if ROWS_AT_ONCE > 12
    CASE(13) CASE(14) CASE(15) CASE(16)
#endif
#undef CASE
  }
}

/* Writes what is summed of `rows` rows and vectors col to end of a block, with bias and `plus`. */
static void finish(const product_job *job, long row, long rows, long block, int col, int end,
                   const float *sums) {
  long outputs = job->weight->outputs, first = block * BLOCK;
  const float *bias = job->weight->bias;
  for (long r = 0; r < rows; r++)
    for (int c = col * WIDTH; c < end * WIDTH; c += WIDTH) {
      long place = (row + r) * outputs + first + c;
      vec v = load(sums + r * BLOCK + c);
      if (bias) v = add(v, load(bias + first + c));
      if (job->plus) v = add(v, load(job->plus + place));
      store(job->out + place, v);
    }
}

/* x in tiles of at most ROWS_AT_ONCE rows of like number: tile i has rows i * rows / tiles up to
 * the next one's, and lies as [inputs][rows of the tile]. */
static void lay_out(const product_job *job, long tiles_, float *laid) {
  long inputs = job->weight->inputs;
  for (long i = 0; i < tiles_; i++) {
    long row = i * job->rows / tiles_, rows = (i + 1) * job->rows / tiles_ - row;
    float *to = laid + row * inputs;
    for (long r = 0; r < rows; r++) {
      const float *from = job->x + (row + r) * inputs;
      for (long k = 0; k < inputs; k++) to[k * rows + r] = from[k];
    }
  }
}

static void product_part(void *given) {
  const product_job *job = given;
  const matrix *weight = job->weight;
  long inputs = weight->inputs, rows = job->rows;
  long num_tiles = (rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  long first, end;
  my_part(weight->outputs / WIDTH, &first, &end);
  long per_tile = ROWS_AT_ONCE * BLOCK;
  float *laid = scratch(rows * inputs + 2 * num_tiles * per_tile);
  float *sums = laid + rows * inputs, *whole = sums + num_tiles * per_tile;
  if (rows == 1)
    memcpy(laid, job->x, (size_t)inputs * sizeof(float));
  else
    lay_out(job, num_tiles, laid);
  for (long at = first; at < end;) {
    long block = at / VECS;
    int col = (int)(at % VECS), stop = end - block * VECS < VECS ? (int)(end - block * VECS) : VECS;
    const float *w = weight->packed + block * inputs * BLOCK;
    for (long k = 0; k < inputs;) {
      long of_stretch = k % weight->stretch, left = weight->stretch - of_stretch;
      long n = left < CHUNK ? left : CHUNK;
      if (n > inputs - k) n = inputs - k;
      for (long i = 0; i < num_tiles; i++) {
        long row = i * rows / num_tiles, count = (i + 1) * rows / num_tiles - row;
        any_tiles(count, laid + row * inputs + k * count, w + k * BLOCK, n, sums + i * per_tile,
                  col, stop, of_stretch == 0);
      }
      k += n;
      if (k == inputs || k % weight->stretch == 0) /* a stretch ends */
        for (long i = 0; i < num_tiles * per_tile; i += WIDTH) {
          vec v = load(sums + i);
          if (k > weight->stretch) v = add(load(whole + i), v);
          store(whole + i, v);
        }
    }
    for (long i = 0; i < num_tiles; i++) {
      long row = i * rows / num_tiles;
      finish(job, row, (i + 1) * rows / num_tiles - row, block, col, stop, whole + i * per_tile);
    }
    at = block * VECS + stop;
  }
}

/* out = x @ weight.T + bias + plus. */
void product(const matrix *weight, const float *x, long rows, const float *plus, float *out,
             long threads) {
  product_job job = {weight, x, plus, out, rows};
  in_parallel(product_part, &job, threads, weight->inputs * weight->outputs);
}
