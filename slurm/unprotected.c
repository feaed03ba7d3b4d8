#include "unprotected.h"

#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "number.h"

static const char usual[] = "/run/gemini-hpc";	/* the place where a prolog without settings leaves it */

static bool read_note(const char *run_dir, uint32_t job, char *text, size_t size)
{
	char path[PATH_MAX];
	struct stat st;
	ssize_t got = -1;
	int fd;

	(void)snprintf(path, sizeof(path), "%s.unprotected/%" PRIu32, run_dir, job);
	fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (fd < 0)
		return false;
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == 0)
		got = read(fd, text, size - 1);
	(void)close(fd);
	if (got <= 0)
		return false;
	text[got] = '\0';
	return true;
}

/* The note is "RESTART REASON" or "RESTART elsewhere: REASON". */
bool unprotected_why(const char *run_dir, uint32_t job, uint32_t restart, char why[UNPROTECTED_SIZE], bool *elsewhere)
{
	static const char of_others[] = "elsewhere: ";
	char text[UNPROTECTED_SIZE + 16];
	uint64_t of;
	char *reason;

	if (!read_note(run_dir, job, text, sizeof(text)) &&
	    (strcmp(run_dir, usual) == 0 || !read_note(usual, job, text, sizeof(text))))
		return false;
	text[strcspn(text, "\n")] = '\0';
	reason = strchr(text, ' ');
	if (!reason || !number_parse(text, (size_t)(reason - text), 0, UINT32_MAX, &of) || of != restart || !*++reason)
		return false;
	*elsewhere = strncmp(reason, of_others, sizeof(of_others) - 1) == 0;
	if (*elsewhere)
		reason += sizeof(of_others) - 1;
	(void)snprintf(why, UNPROTECTED_SIZE, "%.*s", UNPROTECTED_SIZE - 1, reason);
	for (char *c = why; *c; c++)
		if (*c < ' ' || *c > '~')
			*c = '?';
	return true;
}
