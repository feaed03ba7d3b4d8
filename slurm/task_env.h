/* The environment of the process that becomes a task. It is the user's, so every value in it is checked. */
#ifndef GEMINI_TASK_ENV_H
#define GEMINI_TASK_ENV_H

#include <stdbool.h>
#include <stdint.h>

#include <slurm/spank.h>

/* Returns a copy for the caller to free; NULL if the variable is unset (or absurdly long). */
char *task_env_get(spank_t sp, const char *name);

bool task_env_has(spank_t sp, const char *name);
bool task_env_is(spank_t sp, const char *name, const char *wanted);

/* Returns true and sets *number if the value is one strict decimal number within min..max. */
bool task_env_number(spank_t sp, const char *name, uint64_t min, uint64_t max, uint32_t *number);

void task_env_set_number(spank_t sp, const char *name, uint64_t number);

#endif
