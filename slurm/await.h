/* The map of one incarnation, waited for where slurmd has skipped the prolog, or the agent moves. */
#ifndef GEMINI_AWAIT_H
#define GEMINI_AWAIT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "map.h"

/*
 * The map of `job` and `restart` in the job's directory. Where it is not there, but the file `waiting` is (the
 * agent has been through an earlier incarnation and has not heard of this one), waits for it, `limit_ms` at most;
 * where nothing says that it comes, `patience_ms`.
 */
bool map_await(const char *run_dir, uint32_t job, uint32_t restart, uid_t owner, uint32_t limit_ms,
	       uint32_t patience_ms, struct map *map);

#endif
