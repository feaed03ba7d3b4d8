#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <slurm/slurm.h>

#include "await.h"
#include "contexts.h"
#include "job_env.h"
#include "layout.h"
#include "map.h"
#include "message.h"
#include "number.h"
#include "options.h"
#include "unprotected.h"

enum { ENV_VALUE_MAX = 1 << 20, NODES_MAX = 1 << 20, TASKS_MAX = 1 << 30, MAP_WAIT_MS = 10000 };

/* A copy of a variable of the task's environment; NULL if unset (or absurdly long). */
static char *env_get(spank_t sp, const char *name)
{
	for (int size = 256; size <= ENV_VALUE_MAX; size *= 16) {
		char *value = malloc((size_t)size);
		spank_err_t err;

		if (!value)
			return NULL;
		err = spank_getenv(sp, name, value, size);
		if (err == ESPANK_SUCCESS)
			return value;
		free(value);
		if (err != ESPANK_NOSPACE)
			return NULL;
	}
	return NULL;
}

static bool env_has(spank_t sp, const char *name)
{
	char byte[2];

	return spank_getenv(sp, name, byte, sizeof(byte)) != ESPANK_ENV_NOEXIST;
}

static bool env_number(spank_t sp, const char *name, uint64_t min, uint64_t max, uint32_t *number)
{
	char *value = env_get(sp, name);
	uint64_t parsed = 0;
	const bool good = value && number_parse_string(value, min, max, &parsed);

	free(value);
	if (good)
		*number = (uint32_t)parsed;
	return good;
}

static bool env_is(spank_t sp, const char *name, const char *wanted)
{
	char *value = env_get(sp, name);
	const bool same = value && strcmp(value, wanted) == 0;

	free(value);
	return same;
}

static void env_set_number(spank_t sp, const char *name, uint64_t number)
{
	char value[24];

	(void)snprintf(value, sizeof(value), "%" PRIu64, number);
	(void)spank_setenv(sp, name, value, 1);
}

/* What --export=NONE took away from the user's code. */
static void restore_option(spank_t sp, const char *slurm_name, const char *name)
{
	char *value = env_get(sp, slurm_name);

	if (value)
		(void)spank_setenv(sp, name, value, 1);
	free(value);
}

/* One voice per step: its task 0 (of all components, if it is a heterogeneous one). */
static bool speaks(spank_t sp)
{
	uint32_t procid;

	return env_number(sp, "SLURM_PROCID", 0, UINT32_MAX, &procid) && procid == 0;
}

static void forget_inherited_place(spank_t sp)
{
	for (size_t i = 0; job_env_place[i]; i++)
		(void)spank_unsetenv(sp, job_env_place[i]);
}

/* A task that runs srun hands its own RANK on to the tasks of that step. */
static void forget_inherited_ranks(spank_t sp, const char *ranks_of)
{
	if (!env_has(sp, ENV_RANKS_OF) || env_is(sp, ENV_RANKS_OF, ranks_of))
		return;
	(void)spank_unsetenv(sp, ENV_RANKS_OF);
	for (size_t i = 0; job_env_ranks[i]; i++)
		(void)spank_unsetenv(sp, job_env_ranks[i]);
}

static bool user_set_ranks(spank_t sp)
{
	for (size_t i = 0; job_env_ranks[i]; i++)
		if (env_has(sp, job_env_ranks[i]))
			return true;
	return false;
}

static void export_place(spank_t sp, const struct map *map)
{
	(void)spank_setenv(sp, ENV_SOCKET, map->socket, 1);
	if (map->node_rank != MAP_SPARE)
		env_set_number(sp, ENV_NODE_RANK, map->node_rank);
	env_set_number(sp, ENV_NODES, map->nodes);
	env_set_number(sp, ENV_EPOCH, map->epoch);
	env_set_number(sp, ENV_RESTART, map->restart);
}

/* Tasks per node, if the step's nodes are exactly the map's and Slurm's figures agree; else NULL. */
static uint32_t *step_layout(spank_t sp, const struct map *map, uint32_t total, uint32_t here,
			     uint32_t node_id)
{
	uint32_t nodes;
	uint32_t *tasks = NULL;
	char *text = NULL;
	uint64_t sum;

	if (!env_number(sp, "SLURM_STEP_NUM_NODES", 1, MAP_NODES_MAX, &nodes) || nodes != map->nodes ||
	    !env_is(sp, "SLURM_STEP_NODELIST", map->nodelist))
		return NULL;
	if (node_id >= nodes || map->node_ranks[node_id] != map->node_rank)
		return NULL;
	text = env_get(sp, "SLURM_STEP_TASKS_PER_NODE");
	tasks = calloc(nodes, sizeof(*tasks));
	if (text && tasks && layout_parse(text, nodes, tasks) && tasks[node_id] == here) {
		sum = layout_first_rank(tasks, map->node_ranks, nodes, nodes);
		if (sum == total) {
			free(text);
			return tasks;
		}
	}
	free(text);
	free(tasks);
	return NULL;
}

static void export_ranks(spank_t sp, const struct map *map, uint32_t step, const char *ranks_of)
{
	uint32_t node_id, local_id, here, total;
	uint32_t *tasks;

	forget_inherited_ranks(sp, ranks_of);
	if (user_set_ranks(sp))
		return;
	if (!env_number(sp, "SLURM_NODEID", 0, MAP_NODES_MAX, &node_id) ||
	    !env_number(sp, "SLURM_LOCALID", 0, TASKS_MAX, &local_id) ||
	    spank_get_item(sp, S_JOB_LOCAL_TASK_COUNT, &here) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_TOTAL_TASK_COUNT, &total) != ESPANK_SUCCESS || local_id >= here)
		return;
	tasks = step_layout(sp, map, total, here, node_id);
	if (!tasks)
		return;
	env_set_number(sp, "RANK",
		       layout_first_rank(tasks, map->node_ranks, map->nodes, map->node_rank) + local_id);
	env_set_number(sp, "WORLD_SIZE", total);
	env_set_number(sp, "LOCAL_RANK", local_id);
	env_set_number(sp, "LOCAL_WORLD_SIZE", here);
	(void)spank_setenv(sp, "MASTER_ADDR", map->master_addr, 1);
	env_set_number(sp, "MASTER_PORT", (uint64_t)map->master_port + step % MAP_PORT_SPREAD);
	(void)spank_setenv(sp, ENV_RANKS_OF, ranks_of, 1);
	free(tasks);
}

/*
 * The job's output says it once for each node that has its own reason: the
 * batch script's node there, the others where a step's first task begins.
 */
static void tell_why(spank_t sp, const struct config *config, uint32_t job, uint32_t restart)
{
	char why[UNPROTECTED_SIZE];
	uint32_t local_id;
	char *node;

	if (!unprotected_why(config->run_dir, job, restart, why))
		return;
	if (!env_is(sp, ENV_UNPROTECTED, why) && env_number(sp, "SLURM_LOCALID", 0, TASKS_MAX, &local_id) &&
	    local_id == 0) {
		node = env_get(sp, "SLURMD_NODENAME");
		slurm_error(MESSAGE_PREFIX "this job is not protected on %s: %s", node ? node : "this node", why);
		free(node);
	}
	(void)spank_setenv(sp, ENV_UNPROTECTED, why, 1);
}

/*
 * Such a job never has an agent. Where one has written a map the job was made
 * smaller while it ran, and its steps go on without.
 */
static void end_if_unprotectable(spank_t sp, const struct config *config, uint32_t job, uint32_t restart,
				 uint32_t replicas)
{
	struct map map;
	uint32_t nodes;

	if (!env_number(sp, "SLURM_JOB_NUM_NODES", 1, NODES_MAX, &nodes) || replicas <= nodes)
		return;
	if (map_await(config->run_dir, job, restart, geteuid(), 0, &map)) {
		map_free(&map);
		return;
	}
	if (speaks(sp) && env_has(sp, SLURM_ENV(ENV_REDUNDANCY)))
		slurm_error(MESSAGE_PREFIX "--gemini-redundancy wants %" PRIu32 " nodes for a group, and this job has %" PRIu32
			    ": ask for more nodes or a smaller group",
			    replicas, nodes);
	else if (speaks(sp))
		slurm_error(MESSAGE_PREFIX "--gemini-replicas=%" PRIu32 " wants %" PRIu32 " nodes, one per copy, "
			    "and this job has %" PRIu32 ": ask for more nodes or fewer replicas",
			    replicas, replicas, nodes);
	_exit(EXIT_UNPROTECTABLE);
}

int remote_task_init(spank_t sp, const struct config *config)
{
	uint32_t replicas, job, step, restart = 0;
	char ranks_of[64];
	struct map map;

	if (!env_number(sp, SLURM_ENV(ENV_REPLICAS), 1, REPLICAS_MAX, &replicas) ||
	    spank_get_item(sp, S_JOB_ID, &job) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_STEPID, &step) != ESPANK_SUCCESS || step == SLURM_EXTERN_CONT)
		return 0;
	forget_inherited_place(sp);
	restore_option(sp, SLURM_ENV(ENV_REPLICAS), ENV_REPLICAS);
	restore_option(sp, SLURM_ENV(ENV_REDUNDANCY), ENV_REDUNDANCY);
	restore_option(sp, SLURM_ENV(ENV_TIER), ENV_TIER);
	restore_option(sp, SLURM_ENV(ENV_TIER_INTERVAL), ENV_TIER_INTERVAL);
	restore_option(sp, SLURM_ENV(ENV_SPARES), ENV_SPARES);
	if (env_has(sp, "SLURM_HET_SIZE")) {
		if (speaks(sp))
			slurm_error(MESSAGE_PREFIX "heterogeneous jobs are not supported: this job is not protected");
		return 0;
	}
	if (env_has(sp, "SLURM_RESTART_COUNT") &&
	    !env_number(sp, "SLURM_RESTART_COUNT", 0, UINT32_MAX, &restart))
		return 0;
	end_if_unprotectable(sp, config, job, restart, replicas);
	if (!map_await(config->run_dir, job, restart, geteuid(), MAP_WAIT_MS, &map)) {
		tell_why(sp, config, job, restart);
		return 0;
	}
	(void)spank_unsetenv(sp, ENV_UNPROTECTED);
	export_place(sp, &map);
	(void)snprintf(ranks_of, sizeof(ranks_of), "%" PRIu32 ".%" PRIu32 ".%" PRIu32, job, restart, step);
	if (step <= SLURM_MAX_NORMAL_STEP_ID)
		export_ranks(sp, &map, step, ranks_of);
	map_free(&map);
	return 0;
}
