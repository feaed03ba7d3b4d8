#include <stdlib.h>

#include "contexts.h"
#include "job_env.h"
#include "options.h"

int allocator_init_post_opt(spank_t sp)
{
	const struct options *options = options_get();

	/*
	 * Slurm ignores an error here from a plugin that plugstack.conf calls
	 * optional, and would submit a job that lacks what was asked for.
	 */
	if (!options_complete(options))
		exit(EXIT_FAILURE);
	return job_env_publish(sp, options);
}
