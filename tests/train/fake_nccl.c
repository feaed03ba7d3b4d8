/* A libnccl.so.2 for tests: no GPU, no network; writes down what it is asked and answers as the test wishes.
   FAKE_NCCL_LOG: file for the calls. FAKE_NCCL_BUSY: so many asks after each call answer "in progress".
   FAKE_NCCL_FAIL: the call of this name fails. */
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct {
  size_t size; unsigned magic, version; int blocking, cgaClusterSize, minCTAs, maxCTAs; const char *netName;
  int splitShare;
} ncclConfig;
typedef struct { int rank, world, busy; } Comm;

static int depth, state;

static int done(const char *name, const char *format, ...) {
  const char *path = getenv("FAKE_NCCL_LOG"), *fail = getenv("FAKE_NCCL_FAIL");
  FILE *log = path ? fopen(path, "a") : NULL;
  if (log) {
    va_list rest;
    va_start(rest, format);
    fprintf(log, "%s", name);
    vfprintf(log, format, rest);
    fputc('\n', log);
    va_end(rest);
    fclose(log);
  }
  return fail && !strcmp(fail, name) ? 6 : 0;
}

static void start(Comm *comm) { const char *busy = getenv("FAKE_NCCL_BUSY"); comm->busy = busy ? atoi(busy) : 0; }

int ncclGetVersion(int *version) { *version = 22800; return 0; }
const char *ncclGetErrorString(int result) { return result == 6 ? "remote process exited" : "other"; }

int ncclGetUniqueId(ncclUniqueId *id) {
  for (int i = 0; i < 128; i++) id->internal[i] = (char)(i * 2); /* with zeros in it */
  return done("ncclGetUniqueId", "");
}

int ncclCommInitRankConfig(Comm **comm, int world, ncclUniqueId id, int rank, ncclConfig *config) {
  int same = 1;
  for (int i = 0; i < 128; i++) same &= id.internal[i] == (char)(i * 2);
  *comm = calloc(1, sizeof **comm);
  (*comm)->rank = rank; (*comm)->world = world;
  start(*comm);
  return done("ncclCommInitRankConfig", " %d/%d id=%d size=%d magic=%x blocking=%d least=%d most=%d net=%d", rank, world,
              same, config->size == sizeof *config, config->magic, config->blocking, config->minCTAs, config->maxCTAs,
              config->netName != NULL);
}

int ncclCommGetAsyncError(Comm *comm, int *now) {
  const char *fail = getenv("FAKE_NCCL_FAIL");
  if (comm->busy > 0) comm->busy--;
  *now = fail && !strcmp(fail, "async") ? 6 : comm->busy ? 7 : state;
  return 0;
}

int ncclCommAbort(Comm *comm) { free(comm); return done("ncclCommAbort", ""); }
int ncclGroupStart(void) { depth++; return done("ncclGroupStart", ""); }
int ncclGroupEnd(void) { depth--; return done("ncclGroupEnd", " depth=%d", depth); }

int ncclSend(const void *data, size_t count, int type, int peer, Comm *comm, void *stream) {
  start(comm);
  return done("ncclSend", " first=%d count=%zu type=%d peer=%d stream=%p", *(const unsigned char *)data, count, type,
              peer, stream);
}

int ncclRecv(void *data, size_t count, int type, int peer, Comm *comm, void *stream) {
  memset(data, 7, count);
  start(comm);
  return done("ncclRecv", " count=%zu type=%d peer=%d stream=%p", count, type, peer, stream);
}
