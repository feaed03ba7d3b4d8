#include "config.h"

#include <string.h>

#include <slurm/spank.h>

#include "message.h"

enum { RUN_DIR_MAX = 64 };	/* a socket's path below it must fit into 107 bytes */

static const char run_dir_key[] = "run_dir=";

bool config_parse(int argc, char **argv, struct config *config)
{
	char shown[MESSAGE_SHOWN_SIZE];

	config->run_dir = "/run/gemini-hpc";
	for (int i = 0; i < argc; i++) {
		if (strncmp(argv[i], run_dir_key, sizeof(run_dir_key) - 1) != 0) {
			slurm_error(MESSAGE_PREFIX "plugstack.conf: wanted run_dir=DIR, found '%s'",
				    message_shown(argv[i], shown));
			return false;
		}
		config->run_dir = argv[i] + sizeof(run_dir_key) - 1;
		if (config->run_dir[0] != '/' || strlen(config->run_dir) > RUN_DIR_MAX) {
			slurm_error(MESSAGE_PREFIX "plugstack.conf: run_dir: wanted an absolute path "
				    "of at most %d bytes, found '%s'",
				    RUN_DIR_MAX, message_shown(config->run_dir, shown));
			return false;
		}
	}
	return true;
}
