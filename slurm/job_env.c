#include "job_env.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

#include "message.h"

const char *const job_env_place[] = {
	ENV_SOCKET, ENV_NODE_RANK, ENV_NODES, ENV_EPOCH, ENV_RESTART, NULL,
};

const char *const job_env_ranks[] = {
	"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", NULL,
};

static const char *const option_names[][2] = {
	{ ENV_REPLICAS, SLURM_ENV(ENV_REPLICAS) },
	{ ENV_TIER, SLURM_ENV(ENV_TIER) },
	{ ENV_TIER_INTERVAL, SLURM_ENV(ENV_TIER_INTERVAL) },
	{ ENV_HANG, SLURM_ENV(ENV_HANG) },
	{ ENV_SPARES, SLURM_ENV(ENV_SPARES) },
	{ ENV_AFTER, SLURM_ENV(ENV_AFTER) },
	{ ENV_REDUNDANCY, SLURM_ENV(ENV_REDUNDANCY) },
};

enum { OPTION_NAMES = sizeof(option_names) / sizeof(option_names[0]) };

static void forget_inherited(spank_t sp)
{
	if (getenv(SLURM_ENV(ENV_SPARES)))
		(void)unsetenv(ENV_NO_KILL);
	/* Without SLURM_X, an X is the user's own. */
	for (size_t i = 0; i < OPTION_NAMES; i++) {
		if (getenv(option_names[i][1])) {
			(void)unsetenv(option_names[i][0]);
			(void)unsetenv(option_names[i][1]);
		}
		(void)spank_job_control_unsetenv(sp, option_names[i][0]);
	}
	(void)spank_job_control_unsetenv(sp, ENV_JOB_KEY);
	for (size_t i = 0; job_env_place[i]; i++)
		(void)unsetenv(job_env_place[i]);
	(void)unsetenv(ENV_UNPROTECTED);
	if (getenv(ENV_RANKS_OF)) {
		(void)unsetenv(ENV_RANKS_OF);
		for (size_t i = 0; job_env_ranks[i]; i++)
			(void)unsetenv(job_env_ranks[i]);
	}
}

static int publish(spank_t sp, const char *const names[2], const char *value)
{
	if (setenv(names[0], value, 1) == 0 && setenv(names[1], value, 1) == 0 &&
	    spank_job_control_setenv(sp, names[0], value, 1) == ESPANK_SUCCESS)
		return 0;
	slurm_error(MESSAGE_PREFIX "could not pass %s on to the job: it will not be protected", names[0]);
	return -1;
}

static int publish_number(spank_t sp, const char *const names[2], uint32_t number)
{
	char value[16];

	(void)snprintf(value, sizeof(value), "%" PRIu32, number);
	return publish(sp, names, value);
}

/* A job without a key is protected, but its directory on the tier has only its number. */
static void publish_key(spank_t sp)
{
	uint64_t key;
	char value[17];

	if (getrandom(&key, sizeof(key), 0) != (ssize_t)sizeof(key))
		return;
	(void)snprintf(value, sizeof(value), "%016" PRIx64, key);
	(void)spank_job_control_setenv(sp, ENV_JOB_KEY, value, 1);
}

int job_env_publish(spank_t sp, const struct options *options)
{
	int rc = 0;

	forget_inherited(sp);
	if (options->replicas) {
		rc |= publish_number(sp, option_names[0], options->replicas);
		publish_key(sp);
	}
	if (options->tier[0])
		rc |= publish(sp, option_names[1], options->tier);
	if (options->tier_interval[0])
		rc |= publish(sp, option_names[2], options->tier_interval);
	if (options->hang[0])
		rc |= publish(sp, option_names[3], options->hang);
	if (options->spares) {
		rc |= publish_number(sp, option_names[4], options->spares);
		(void)setenv(ENV_NO_KILL, "set", 1);
	}
	if (options->after)
		rc |= publish_number(sp, option_names[5], options->after);
	if (options->group)
		rc |= publish(sp, option_names[6], options->redundancy);
	return rc;
}
