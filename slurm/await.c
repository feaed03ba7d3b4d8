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

/* Root has made the directory again a moment ago, for this step or for one that began with it. */
static bool agent_moves(const char *directory, const char *socket_path, uid_t owner, uint32_t patience_ms)
{
	struct timespec now;
	struct stat st, sock;
	int64_t age_ms;

	if (lstat(directory, &st) != 0 || !S_ISDIR(st.st_mode) || st.st_uid != owner ||
	    lstat(socket_path, &sock) == 0 || clock_gettime(CLOCK_REALTIME, &now) != 0)
		return false;
	age_ms = ((int64_t)now.tv_sec - st.st_mtim.tv_sec) * 1000 + (now.tv_nsec - st.st_mtim.tv_nsec) / 1000000;
	return age_ms < (int64_t)patience_ms;
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
	char directory[PATH_MAX - 16];
	char map_path[PATH_MAX];
	char waiting_path[PATH_MAX];
	char socket_path[PATH_MAX];

	(void)snprintf(directory, sizeof(directory), "%s/%" PRIu32, run_dir, job);
	(void)snprintf(map_path, sizeof(map_path), "%s/map", directory);
	(void)snprintf(waiting_path, sizeof(waiting_path), "%s/waiting", directory);
	(void)snprintf(socket_path, sizeof(socket_path), "%s/agent.sock", directory);
	for (uint32_t waited_ms = 0;; waited_ms += POLL_MS) {
		/* In this order: the agent removes `waiting` after it has put the map in place. */
		const bool waits = agent_waits(waiting_path, owner);
		const bool moves = agent_moves(directory, socket_path, owner, patience_ms);

		if (map_of(map_path, job, restart, owner, map))
			return true;
		if (waited_ms >= (waits ? limit_ms : moves ? patience_ms : 0))
			return false;
		(void)nanosleep(&poll, NULL);
	}
}
