/* The smallest test frame that says where it failed. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                       \
	do {                                                                                   \
		if (!(condition)) {                                                            \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
			exit(1);                                                               \
		}                                                                              \
	} while (0)

#define CHECK_STRING(found, wanted)                                                            \
	do {                                                                                   \
		const char *found_ = (found), *wanted_ = (wanted);                             \
		if (!found_ || !wanted_ ? found_ != wanted_ : strcmp(found_, wanted_) != 0) {  \
			fprintf(stderr, "%s:%d: %s: wanted %s, found %s\n", __FILE__, __LINE__, #found, \
				wanted_ ? wanted_ : "nothing", found_ ? found_ : "nothing");   \
			exit(1);                                                               \
		}                                                                              \
	} while (0)

#define PASSED() printf("passed: %s\n", __FILE__)

#endif
