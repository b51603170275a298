/* Work split among the threads of the OpenMP that PyTorch runs on, so that no second pool of threads
 * waits beside it. */

#pragma once

typedef void (*region)(void *);

/* Calls work(job) in each of `threads` threads; in this one alone where there are few `numbers` to
 * compute. */
void in_parallel(region work, void *job, long threads, long numbers);

/* This thread's part of `count` things. */
void my_part(long count, long *first, long *end);

/* Memory of this thread that lasts until its next request; freed when the thread ends. */
float *scratch(long numbers);
