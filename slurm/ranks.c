#include "ranks.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include <slurm/slurm.h>

#include "job_env.h"
#include "layout.h"
#include "ports.h"
#include "task_env.h"

enum { TASKS_MAX = 1 << 30, HOST_SIZE = 256 };

/* A task's place in its step, from Slurm; `total` and `here`: tasks of the step, and those on this node. */
struct place {
	uint32_t nodes, node_id, local_id, here, total;
};

static bool place_of(spank_t sp, struct place *place)
{
	return task_env_number(sp, "SLURM_STEP_NUM_NODES", 1, MAP_NODES_MAX, &place->nodes) &&
	       task_env_number(sp, "SLURM_NODEID", 0, place->nodes - 1, &place->node_id) &&
	       task_env_number(sp, "SLURM_LOCALID", 0, TASKS_MAX, &place->local_id) &&
	       spank_get_item(sp, S_JOB_LOCAL_TASK_COUNT, &place->here) == ESPANK_SUCCESS &&
	       spank_get_item(sp, S_JOB_TOTAL_TASK_COUNT, &place->total) == ESPANK_SUCCESS &&
	       place->local_id < place->here && place->here <= place->total;
}

/* Removes an outer step's variables: a task that runs srun passes its own RANK on to the tasks of that step. */
static void forget_inherited(spank_t sp, const char *ranks_of)
{
	if (!task_env_has(sp, ENV_RANKS_OF) || task_env_is(sp, ENV_RANKS_OF, ranks_of))
		return;
	(void)spank_unsetenv(sp, ENV_RANKS_OF);
	for (size_t i = 0; job_env_ranks[i]; i++)
		(void)spank_unsetenv(sp, job_env_ranks[i]);
}

static bool user_set_one(spank_t sp)
{
	for (size_t i = 0; job_env_ranks[i]; i++)
		if (task_env_has(sp, job_env_ranks[i]))
			return true;
	return false;
}

/* Sets the first rank of this node, if the step's nodes are exactly the map's and Slurm's numbers agree. */
static bool first_by_map(spank_t sp, const struct map *map, const struct place *place, uint64_t *first)
{
	uint32_t *tasks;
	char *text;
	bool good;

	if (place->nodes != map->nodes || !task_env_is(sp, "SLURM_STEP_NODELIST", map->nodelist) ||
	    map->node_ranks[place->node_id] != map->node_rank)
		return false;
	text = task_env_get(sp, "SLURM_STEP_TASKS_PER_NODE");
	tasks = calloc(place->nodes, sizeof(*tasks));
	good = text && tasks && layout_parse(text, place->nodes, tasks) && tasks[place->node_id] == place->here &&
	       layout_first_rank(tasks, map->node_ranks, place->nodes, place->nodes) == place->total;
	if (good)
		*first = layout_first_rank(tasks, map->node_ranks, place->nodes, map->node_rank);
	free(text);
	free(tasks);
	return good;
}

/*
 * Sets rank and master without a map. Returns false in a job with spares, whose launcher places the ranks, and
 * with an arbitrary distribution, where task 0 may be on any host.
 */
static bool by_slurm(spank_t sp, const struct place *place, uint32_t *rank, char master[HOST_SIZE])
{
	uint32_t nodes;
	char *list;
	bool good;

	if (!task_env_number(sp, "SLURM_JOB_NUM_NODES", 1, MAP_NODES_MAX, &nodes) || nodes != place->nodes ||
	    !task_env_number(sp, "SLURM_PROCID", 0, place->total - 1, rank) ||
	    task_env_has(sp, SLURM_ENV(ENV_SPARES)) || task_env_is(sp, "SLURM_DISTRIBUTION", "arbitrary"))
		return false;
	list = task_env_get(sp, "SLURM_STEP_NODELIST");
	good = list && layout_first_host(list, master, HOST_SIZE);
	free(list);
	return good;
}

void ranks_export(spank_t sp, const struct step *step, const struct map *map)
{
	char ranks_of[64], host[HOST_SIZE];
	struct place place;
	uint64_t first = 0;
	uint32_t rank = 0;

	if (step->number > SLURM_MAX_NORMAL_STEP_ID)
		return;
	(void)snprintf(ranks_of, sizeof(ranks_of), "%" PRIu32 ".%" PRIu32 ".%" PRIu32, step->job, step->restart,
		       step->number);
	forget_inherited(sp, ranks_of);
	if (user_set_one(sp) || !place_of(sp, &place) ||
	    !(map ? first_by_map(sp, map, &place, &first) : by_slurm(sp, &place, &rank, host)))
		return;
	task_env_set_number(sp, "RANK", map ? first + place.local_id : rank);
	task_env_set_number(sp, "WORLD_SIZE", place.total);
	task_env_set_number(sp, "LOCAL_RANK", place.local_id);
	task_env_set_number(sp, "LOCAL_WORLD_SIZE", place.here);
	(void)spank_setenv(sp, "MASTER_ADDR", map ? map->master_addr : host, 1);
	task_env_set_number(sp, "MASTER_PORT",
			    ports_of_step(map ? map->master_port : ports_base(step->job, step->restart), step->number));
	(void)spank_setenv(sp, ENV_RANKS_OF, ranks_of, 1);
}
