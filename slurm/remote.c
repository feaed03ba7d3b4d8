#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <slurm/slurm.h>

#include "again.h"
#include "await.h"
#include "contexts.h"
#include "job_env.h"
#include "map.h"
#include "message.h"
#include "options.h"
#include "ranks.h"
#include "task_env.h"
#include "unprotected.h"

enum { NODES_MAX = 1 << 20, TASKS_MAX = 1 << 30, MAP_WAIT_MS = 10000, MOVE_WAIT_MS = 2000 };

static const char python[] = "/opt/gemini-hpc/venv/bin/python3";	/* the prolog's Python */

/* Restores an option for the user's code that --export=NONE removed. */
static void restore_option(spank_t sp, const char *slurm_name, const char *name)
{
	char *value = task_env_get(sp, slurm_name);

	if (value)
		(void)spank_setenv(sp, name, value, 1);
	free(value);
}

/* Only one task of a step prints messages: its task 0 (of all components of a heterogeneous step). */
static bool speaks(spank_t sp)
{
	uint32_t procid;

	return task_env_number(sp, "SLURM_PROCID", 0, UINT32_MAX, &procid) && procid == 0;
}

static void forget_inherited_place(spank_t sp)
{
	for (size_t i = 0; job_env_place[i]; i++)
		(void)spank_unsetenv(sp, job_env_place[i]);
}

static void export_place(spank_t sp, const struct map *map)
{
	(void)spank_setenv(sp, ENV_SOCKET, map->socket, 1);
	if (map->node_rank != MAP_SPARE)
		task_env_set_number(sp, ENV_NODE_RANK, map->node_rank);
	task_env_set_number(sp, ENV_NODES, map->nodes);
	task_env_set_number(sp, ENV_EPOCH, map->epoch);
	task_env_set_number(sp, ENV_RESTART, map->restart);
}

/*
 * Prints the reason once for each node with a reason of its own: on the batch script's node there, on other
 * nodes where a step's first task begins. A reason on other nodes, or the lack of any reason, is printed by
 * task 0 for all.
 */
static void tell_why(spank_t sp, const struct config *config, const struct step *step)
{
	char *node = task_env_get(sp, "SLURMD_NODENAME");
	const char *const here = node ? node : "this node";
	char why[UNPROTECTED_SIZE];
	bool elsewhere = true;
	uint32_t local_id;

	if (!unprotected_why(config->run_dir, step->job, step->restart, why, &elsewhere))
		(void)snprintf(why, sizeof(why), "the prolog on %.160s started no agent and left no reason: "
			       "run gemini-hpc doctor there", here);
	if (task_env_is(sp, ENV_UNPROTECTED, why))
		;
	else if (elsewhere && speaks(sp))
		slurm_error(MESSAGE_PREFIX "this job is not protected: %s", why);
	else if (!elsewhere && task_env_number(sp, "SLURM_LOCALID", 0, TASKS_MAX, &local_id) && local_id == 0)
		slurm_error(MESSAGE_PREFIX "this job is not protected on %s: %s", here, why);
	(void)spank_setenv(sp, ENV_UNPROTECTED, why, 1);
	free(node);
}

/*
 * Ends the task of a job with fewer nodes than replicas: such a job never has an agent. If an agent has
 * written a map, the job was made smaller while it ran, and its steps go on.
 */
static void end_if_unprotectable(spank_t sp, const struct config *config, uint32_t job, uint32_t restart,
				 uint32_t replicas)
{
	struct map map;
	uint32_t nodes;

	if (!task_env_number(sp, "SLURM_JOB_NUM_NODES", 1, NODES_MAX, &nodes) || replicas <= nodes)
		return;
	if (map_await(config->run_dir, job, restart, geteuid(), 0, 0, &map)) {
		map_free(&map);
		return;
	}
	if (speaks(sp) && task_env_has(sp, SLURM_ENV(ENV_REDUNDANCY)))
		slurm_error(MESSAGE_PREFIX "--gemini-redundancy wants %" PRIu32 " nodes for a group, and this job has %" PRIu32
			    ": ask for more nodes or a smaller group",
			    replicas, nodes);
	else if (speaks(sp))
		slurm_error(MESSAGE_PREFIX "--gemini-replicas=%" PRIu32 " wants %" PRIu32 " nodes, one per copy, "
			    "and this job has %" PRIu32 ": ask for more nodes or fewer replicas",
			    replicas, replicas, nodes);
	_exit(EXIT_UNPROTECTABLE);
}

int remote_init_post_opt(spank_t sp, const struct config *config)
{
	uint32_t replicas, job, step;
	uid_t owner;

	if (geteuid() == 0 && task_env_number(sp, SLURM_ENV(ENV_REPLICAS), 1, REPLICAS_MAX, &replicas) &&
	    spank_get_item(sp, S_JOB_ID, &job) == ESPANK_SUCCESS &&
	    spank_get_item(sp, S_JOB_UID, &owner) == ESPANK_SUCCESS &&
	    spank_get_item(sp, S_JOB_STEPID, &step) == ESPANK_SUCCESS && step != SLURM_EXTERN_CONT)
		(void)again_make(python, config->run_dir, job, owner);
	return 0;
}

int remote_task_init(spank_t sp, const struct config *config)
{
	struct step step = { 0 };
	uint32_t replicas;
	struct map map;

	if (!task_env_number(sp, SLURM_ENV(ENV_REPLICAS), 1, REPLICAS_MAX, &replicas) ||
	    spank_get_item(sp, S_JOB_ID, &step.job) != ESPANK_SUCCESS ||
	    spank_get_item(sp, S_JOB_STEPID, &step.number) != ESPANK_SUCCESS || step.number == SLURM_EXTERN_CONT)
		return 0;
	forget_inherited_place(sp);
	restore_option(sp, SLURM_ENV(ENV_REPLICAS), ENV_REPLICAS);
	restore_option(sp, SLURM_ENV(ENV_REDUNDANCY), ENV_REDUNDANCY);
	restore_option(sp, SLURM_ENV(ENV_TIER), ENV_TIER);
	restore_option(sp, SLURM_ENV(ENV_TIER_INTERVAL), ENV_TIER_INTERVAL);
	restore_option(sp, SLURM_ENV(ENV_SPARES), ENV_SPARES);
	if (task_env_has(sp, "SLURM_HET_SIZE")) {
		if (speaks(sp))
			slurm_error(MESSAGE_PREFIX "heterogeneous jobs are not supported: this job is not protected");
		return 0;
	}
	if (task_env_has(sp, "SLURM_RESTART_COUNT") &&
	    !task_env_number(sp, "SLURM_RESTART_COUNT", 0, UINT32_MAX, &step.restart))
		return 0;
	end_if_unprotectable(sp, config, step.job, step.restart, replicas);
	if (!map_await(config->run_dir, step.job, step.restart, geteuid(), MAP_WAIT_MS, MOVE_WAIT_MS, &map)) {
		tell_why(sp, config, &step);
		ranks_export(sp, &step, NULL);
		return 0;
	}
	(void)spank_unsetenv(sp, ENV_UNPROTECTED);
	export_place(sp, &map);
	ranks_export(sp, &step, &map);
	map_free(&map);
	return 0;
}
