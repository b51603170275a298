#include "threads.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static void (*openmp_parallel)(region, void *, unsigned, unsigned);
static int (*openmp_thread)(void);
static int (*openmp_threads)(void);

/* GOMP_parallel, omp_get_thread_num and omp_get_num_threads of that OpenMP. Call it first. */
void use_openmp(void *parallel, void *thread, void *threads) {
  openmp_parallel = (void (*)(region, void *, unsigned, unsigned))parallel;
  openmp_thread = (int (*)(void))thread;
  openmp_threads = (int (*)(void))threads;
}

/* A region costs as much as reading so many numbers from the cache. */
#define WORTH_A_REGION (32 * 1024)

/* Whether this thread does all of a job, perhaps inside of a region of somebody else's. */
static __thread int alone;

void in_parallel(region work, void *job, long threads, long numbers) {
  if (threads > 1 && numbers >= WORTH_A_REGION) {
    openmp_parallel(work, job, (unsigned)threads, 0);
  } else {
    alone = 1;
    work(job);
    alone = 0;
  }
}

void my_part(long count, long *first, long *end) {
  long threads = alone ? 1 : openmp_threads(), thread = alone ? 0 : openmp_thread();
  *first = count * thread / threads;
  *end = count * (thread + 1) / threads;
}

static pthread_key_t key_of_scratch;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void make_key(void) { pthread_key_create(&key_of_scratch, free); }

float *scratch(long numbers) {
  static __thread float *memory;
  static __thread long size;
  if (numbers <= size) return memory;
  pthread_once(&once, make_key);
  free(memory);
  if (posix_memalign((void **)&memory, 64, (size_t)numbers * sizeof(float))) {
    fprintf(stderr, "agentevo: no memory for %ld numbers\n", numbers);
    abort();
  }
  size = numbers;
  pthread_setspecific(key_of_scratch, memory);
  return memory;
}
