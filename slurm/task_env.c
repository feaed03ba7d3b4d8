#include "task_env.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "number.h"

enum { VALUE_MAX = 1 << 20 };

char *task_env_get(spank_t sp, const char *name)
{
	for (int size = 256; size <= VALUE_MAX; size *= 16) {
		char *value = malloc((size_t)size);
		spank_err_t err;

		if (!value)
			return NULL;
		err = spank_getenv(sp, name, value, size);
		if (err == ESPANK_SUCCESS)
			return value;
		free(value);
		if (err != ESPANK_NOSPACE)
			return NULL;
	}
	return NULL;
}

bool task_env_has(spank_t sp, const char *name)
{
	char byte[2];

	return spank_getenv(sp, name, byte, sizeof(byte)) != ESPANK_ENV_NOEXIST;
}

bool task_env_is(spank_t sp, const char *name, const char *wanted)
{
	char *value = task_env_get(sp, name);
	const bool same = value && strcmp(value, wanted) == 0;

	free(value);
	return same;
}

bool task_env_number(spank_t sp, const char *name, uint64_t min, uint64_t max, uint32_t *number)
{
	char *value = task_env_get(sp, name);
	uint64_t parsed = 0;
	const bool good = value && number_parse_string(value, min, max, &parsed);

	free(value);
	if (good)
		*number = (uint32_t)parsed;
	return good;
}

void task_env_set_number(spank_t sp, const char *name, uint64_t number)
{
	char value[24];

	(void)snprintf(value, sizeof(value), "%" PRIu64, number);
	(void)spank_setenv(sp, name, value, 1);
}
