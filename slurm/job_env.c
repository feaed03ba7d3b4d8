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

const char *const job_env_options[OPTION_COUNT][2] = {
	[OPTION_REPLICAS] = { ENV_REPLICAS, SLURM_ENV(ENV_REPLICAS) },
	[OPTION_REDUNDANCY] = { ENV_REDUNDANCY, SLURM_ENV(ENV_REDUNDANCY) },
	[OPTION_TIER] = { ENV_TIER, SLURM_ENV(ENV_TIER) },
	[OPTION_TIER_INTERVAL] = { ENV_TIER_INTERVAL, SLURM_ENV(ENV_TIER_INTERVAL) },
	[OPTION_HANG] = { ENV_HANG, SLURM_ENV(ENV_HANG) },
	[OPTION_SPARES] = { ENV_SPARES, SLURM_ENV(ENV_SPARES) },
	[OPTION_AFTER] = { ENV_AFTER, SLURM_ENV(ENV_AFTER) },
};

static void forget_inherited(spank_t sp)
{
	if (getenv(SLURM_ENV(ENV_SPARES)))
		(void)unsetenv(ENV_NO_KILL);
	/* Without SLURM_X, an X is the user's own. */
	for (size_t i = 0; i < OPTION_COUNT; i++) {
		if (getenv(job_env_options[i][1])) {
			(void)unsetenv(job_env_options[i][0]);
			(void)unsetenv(job_env_options[i][1]);
		}
		(void)spank_job_control_unsetenv(sp, job_env_options[i][0]);
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
	for (size_t i = 0; i < OPTION_COUNT; i++)
		if (options->text[i][0])
			rc |= publish(sp, job_env_options[i], options->text[i]);
	if (options->replicas)
		publish_key(sp);
	if (options->spares)
		(void)setenv(ENV_NO_KILL, "set", 1);
	return rc;
}
