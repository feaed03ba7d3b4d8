#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "contexts.h"
#include "job_env.h"
#include "message.h"
#include "options.h"

/* Returns a value of the allocation, which the step inherits. */
static const char *value_of_job(enum option which)
{
	const char *value = getenv(job_env_options[which][1]);

	return value ? value : "";
}

/* Other values than the job's cannot take effect on a step without a prolog. */
static bool differs_from_job(const struct options *options)
{
	char group[16];

	for (enum option i = 0; i < OPTION_COUNT; i++)
		if (options->text[i][0] && strcmp(options->text[i], value_of_job(i)) != 0)
			return true;
	(void)snprintf(group, sizeof(group), "%" PRIu32, options->group);
	return options->group && strcmp(group, value_of_job(OPTION_REPLICAS)) != 0;
}

int local_init_post_opt(spank_t sp)
{
	const struct options *options = options_get();

	if (getenv("SLURM_JOB_ID")) {
		if (differs_from_job(options))
			slurm_error(MESSAGE_PREFIX "the --gemini options belong to the allocation and have no effect "
				    "on a step: give them to sbatch, salloc or an srun that makes its own");
		return 0;
	}
	return allocator_init_post_opt(sp);
}
