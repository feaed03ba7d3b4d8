#include <stdlib.h>
#include <string.h>

#include "contexts.h"
#include "job_env.h"
#include "message.h"
#include "number.h"
#include "options.h"

/* A step inherits the job's options; other values cannot take effect without a prolog. */
static void warn_if_different(const struct options *options)
{
	const char *replicas = getenv(SLURM_ENV(ENV_REPLICAS));
	const char *redundancy = getenv(SLURM_ENV(ENV_REDUNDANCY));
	const char *tier = getenv(SLURM_ENV(ENV_TIER));
	const char *hang = getenv(SLURM_ENV(ENV_HANG));
	const char *interval = getenv(SLURM_ENV(ENV_TIER_INTERVAL));
	const char *spares = getenv(SLURM_ENV(ENV_SPARES));
	const char *after = getenv(SLURM_ENV(ENV_AFTER));
	uint32_t job_replicas = 0;
	uint32_t job_spares = 0;
	uint32_t job_after = 0;

	if (replicas)
		(void)options_parse_replicas(replicas, &job_replicas);
	if (spares)
		(void)options_parse_spares(spares, &job_spares);
	if (after)
		(void)options_parse_after(after, &job_after);
	if ((options->replicas && options->replicas != job_replicas) ||
	    (options->group && (options->group != job_replicas || strcmp(options->redundancy, redundancy ? redundancy : "") != 0)) ||
	    (options->tier[0] && strcmp(options->tier, tier ? tier : "") != 0) ||
	    (options->hang[0] && strcmp(options->hang, hang ? hang : "") != 0) ||
	    (options->tier_interval[0] && strcmp(options->tier_interval, interval ? interval : "") != 0) ||
	    (options->spares && options->spares != job_spares) || (options->after && options->after != job_after))
		slurm_error(MESSAGE_PREFIX "the --gemini options belong to the allocation and have no effect "
			    "on a step: give them to sbatch, salloc or an srun that makes its own");
}

int local_init_post_opt(spank_t sp)
{
	const struct options *options = options_get();

	if (getenv("SLURM_JOB_ID")) {
		warn_if_different(options);
		return 0;
	}
	return allocator_init_post_opt(sp);
}
