/* Site settings: the arguments of the plugin's line in plugstack.conf. */
#ifndef GEMINI_CONFIG_H
#define GEMINI_CONFIG_H

#include <stdbool.h>

struct config {
	const char *run_dir;	/* run_dir=DIR: where the prolog makes the jobs' directories */
};

/* False, with a message, on any argument that is not known or not valid. */
bool config_parse(int argc, char **argv, struct config *config);

#endif
