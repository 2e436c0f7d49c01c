/* A made-up libcuda.so.1. As on a GPU, cuInit starts a thread that no fork copies; FAKE_CUDA_LOG gets the caller's pid. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int initialised;

static void *wait_for_ever(void *unused) {
  pthread_setname_np(pthread_self(), "cuda00001400006");
  for (;;) pause();
}

int cuInit(unsigned flags) {
  pthread_t thread;
  FILE *log = fopen(getenv("FAKE_CUDA_LOG"), "a");
  fprintf(log, "%d\n", getpid());
  fclose(log);
  initialised = 1;
  return pthread_create(&thread, NULL, wait_for_ever, NULL);
}

int cuDeviceGetCount(int *count) {
  if (!initialised) return 3; /* CUDA_ERROR_NOT_INITIALIZED */
  *count = 1;
  return 0;
}
