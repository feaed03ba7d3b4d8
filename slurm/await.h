/* The wait for the map of one incarnation, if slurmd has skipped the prolog or the agent moves. */
#ifndef GEMINI_AWAIT_H
#define GEMINI_AWAIT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "map.h"

/*
 * Reads the map of `job` and `restart` in the job's directory. Without a map but with the file `waiting`, it
 * waits for the map, `limit_ms` at most: the agent has served an earlier incarnation and does not know this
 * one yet. A directory without the agent's socket that is younger than `patience_ms` is waited for: the agent
 * is moving there.
 */
bool map_await(const char *run_dir, uint32_t job, uint32_t restart, uid_t owner, uint32_t limit_ms,
	       uint32_t patience_ms, struct map *map);

#endif
