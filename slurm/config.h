/* Site settings: the arguments of the plugin's line in plugstack.conf. */
#ifndef GEMINI_CONFIG_H
#define GEMINI_CONFIG_H

#include <stdbool.h>

struct config {
	const char *run_dir;	/* run_dir=DIR: directory in which the prolog makes the jobs' directories */
};

/* Returns false, with a message, for any argument that is not known or not valid. */
bool config_parse(int argc, char **argv, struct config *config);

#endif
