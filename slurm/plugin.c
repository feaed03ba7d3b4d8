/*
 * gemini-hpc's SPANK plugin: the dispatch by Slurm's context.
 *
 * The plugin prints nothing if all is well, and never prints to standard output: scripts parse sbatch's
 * output.
 */
#include <stdbool.h>

#include <slurm/spank.h>

#include "config.h"
#include "contexts.h"
#include "options.h"

#define EXPORTED __attribute__((visibility("default")))

EXPORTED extern const char plugin_name[];
EXPORTED extern const char plugin_type[];
EXPORTED extern const unsigned int plugin_version;
EXPORTED extern const unsigned int spank_plugin_version;
EXPORTED int slurm_spank_init(spank_t sp, int argc, char **argv);
EXPORTED int slurm_spank_init_post_opt(spank_t sp, int argc, char **argv);
EXPORTED int slurm_spank_task_init(spank_t sp, int argc, char **argv);

SPANK_PLUGIN(gemini_hpc, 1)

static struct config config;
static bool usable;	/* Slurm still calls an optional plugin whose init failed */

/*
 * Returns whether a failure reaches the submitting user. In the contexts of slurmd and slurmstepd it would
 * drain the node, if plugstack.conf calls the plugin required. No failure of ours is worth that: the job runs
 * unprotected.
 */
static bool may_fail(void)
{
	switch (spank_context()) {
	case S_CTX_ALLOCATOR:
	case S_CTX_LOCAL:
		return true;
	default:
		return false;
	}
}

int slurm_spank_init(spank_t sp, int argc, char **argv)
{
	usable = config_parse(argc, argv, &config);
	if (options_register(sp) != 0)
		usable = false;
	return usable || !may_fail() ? 0 : -1;
}

int slurm_spank_init_post_opt(spank_t sp, int argc, char **argv)
{
	(void)argc;
	(void)argv;
	if (!usable)
		return 0;
	switch (spank_context()) {
	case S_CTX_ALLOCATOR:
		return allocator_init_post_opt(sp);
	case S_CTX_LOCAL:
		return local_init_post_opt(sp);
	case S_CTX_REMOTE:
		return remote_init_post_opt(sp, &config);
	default:
		return 0;
	}
}

int slurm_spank_task_init(spank_t sp, int argc, char **argv)
{
	(void)argc;
	(void)argv;
	if (!usable)
		return 0;
	switch (spank_context()) {
	case S_CTX_REMOTE:
		return remote_task_init(sp, &config);
	default:
		return 0;
	}
}
