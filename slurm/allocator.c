#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>

#include "contexts.h"
#include "job_env.h"
#include "message.h"
#include "nodes.h"
#include "options.h"

/* Where the number of nodes is not known yet, each step says it before it starts the user's program. */
static bool asks_for_too_few(uint32_t replicas)
{
	uint32_t most;

	if (!replicas || !nodes_asked_here(&most) || replicas <= most)
		return false;
	slurm_error(MESSAGE_PREFIX "--gemini-replicas=%" PRIu32 " wants %" PRIu32 " nodes, one per copy, and --nodes asks "
		    "for %" PRIu32 ": ask for more nodes or fewer replicas",
		    replicas, replicas, most);
	return true;
}

int allocator_init_post_opt(spank_t sp)
{
	const struct options *options = options_get();

	/*
	 * Slurm ignores an error here from a plugin that plugstack.conf calls
	 * optional, and would submit a job that lacks what was asked for.
	 */
	if (!options_complete(options) || asks_for_too_few(options->replicas))
		exit(EXIT_FAILURE);
	return job_env_publish(sp, options);
}
