#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>

#include "asked.h"
#include "contexts.h"
#include "job_env.h"
#include "message.h"
#include "options.h"

/* Where the number of nodes is not known yet, each step says it before it starts the user's program. */
static bool asks_for_too_few(uint32_t replicas, uint32_t most)
{
	if (!most || replicas <= most)
		return false;
	slurm_error(MESSAGE_PREFIX "--gemini-replicas=%" PRIu32 " wants %" PRIu32 " nodes, one per copy, and --nodes asks "
		    "for %" PRIu32 ": ask for more nodes or fewer replicas",
		    replicas, replicas, most);
	return true;
}

/* What sbatch and salloc take for the option. */
static bool no_kill_by_environment(void)
{
	return getenv("SBATCH_NO_KILL") || getenv("SALLOC_NO_KILL");
}

int allocator_init_post_opt(spank_t sp)
{
	const struct options *options = options_get();
	const struct asked asked = asked_here();

	/*
	 * Slurm ignores an error here from a plugin that plugstack.conf calls
	 * optional, and would submit a job that lacks what was asked for.
	 */
	if (!options_complete(options) || asks_for_too_few(options->replicas, asked.most_nodes))
		exit(EXIT_FAILURE);
	if (options->replicas && (asked.no_kill || no_kill_by_environment()))
		slurm_info(MESSAGE_PREFIX "--no-kill: Slurm does not requeue such a job when it loses a node, so gemini-hpc "
			   "does, and the job comes back with all its nodes");
	return job_env_publish(sp, options);
}
