#include "await.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>

enum { POLL_MS = 20 };

static bool agent_waits(const char *path, uid_t owner)
{
	struct stat st;

	return lstat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == owner;
}

static bool map_of(const char *path, uint32_t job, uint32_t restart, uid_t owner, struct map *map)
{
	if (!map_read(path, owner, map))
		return false;
	if (map->job == job && map->restart == restart)
		return true;
	map_free(map);
	return false;
}

bool map_await(const char *run_dir, uint32_t job, uint32_t restart, uid_t owner, uint32_t limit_ms,
	       uint32_t patience_ms, struct map *map)
{
	const struct timespec poll = { .tv_nsec = POLL_MS * 1000000L };
	char map_path[PATH_MAX];
	char waiting_path[PATH_MAX];

	(void)snprintf(map_path, sizeof(map_path), "%s/%" PRIu32 "/map", run_dir, job);
	(void)snprintf(waiting_path, sizeof(waiting_path), "%s/%" PRIu32 "/waiting", run_dir, job);
	for (uint32_t waited_ms = 0;; waited_ms += POLL_MS) {
		/* In this order: the agent removes `waiting` after it has put the map in place. */
		const bool waits = agent_waits(waiting_path, owner);

		if (map_of(map_path, job, restart, owner, map))
			return true;
		if (waited_ms >= (waits ? limit_ms : patience_ms))
			return false;
		(void)nanosleep(&poll, NULL);
	}
}
