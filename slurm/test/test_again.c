/* When the job's directory is made again before a step, and what is executed for that. */
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

#include "again.h"
#include "test/check.h"

enum { JOB = 123 };

static char top[] = "/tmp/gemini-again-test-XXXXXX";
static char run_dir[64], job_dir[64], ledger[64], entry[64], program[64], told[64];

static void write_file(const char *path, const char *text, mode_t mode)
{
	const int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, mode);

	CHECK(fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text) && close(fd) == 0);
}

static void a_program(const char *ends)
{
	char text[512];

	(void)snprintf(text, sizeof(text),
		       "#!/bin/sh\necho \"$@\" >%s\nls -l /proc/$$/fd | grep -c run.agents >>%s\nenv | sort | grep -v -e ^PWD= -e ^_= -e ^SHLVL= "
		       "-e ^OLDPWD= >>%s\npwd >>%s\n%s\n",
		       told, told, told, told, ends);
	write_file(program, text, 0700);
}

static const char *was_told(void)
{
	static char text[1024];
	const int fd = open(told, O_RDONLY);
	ssize_t got;

	if (fd < 0)
		return "";
	got = read(fd, text, sizeof(text) - 1);
	CHECK(got >= 0 && close(fd) == 0 && unlink(told) == 0);
	text[got] = '\0';
	return text;
}

static bool makes(void)
{
	return again_make(program, run_dir, JOB, geteuid());
}

static void test_nothing_is_run(void)
{
	CHECK(!makes());	/* nobody knows of an agent */
	CHECK(mkdir(ledger, 0700) == 0);
	CHECK(!makes());
	CHECK(symlink(program, entry) == 0);
	CHECK(!makes());
	CHECK(unlink(entry) == 0);
	write_file(entry, "{}", 0600);
	CHECK(mkdir(job_dir, 0700) == 0);
	CHECK(!makes());	/* it is there */
	CHECK(rmdir(job_dir) == 0);
	CHECK_STRING(was_told(), "");
}

static void test_it_is_run(void)
{
	char wanted[256];
	const int open_one = open(entry, O_RDONLY);	/* is not handed on */

	CHECK(open_one > 2);
	(void)snprintf(wanted, sizeof(wanted),
		       "-I -m gemini_hpc.node.again 123 %" PRIuMAX "\n0\nLC_ALL=C.UTF-8\nPATH=/usr/sbin:/usr/bin:/sbin:/bin\n/\n",
		       (uintmax_t)geteuid());
	CHECK(makes());
	CHECK_STRING(was_told(), wanted);
	CHECK(symlink("/", job_dir) == 0);
	CHECK(makes());
	CHECK_STRING(was_told(), wanted);
	CHECK(unlink(job_dir) == 0 && mkdir(job_dir, 0700) == 0);
	CHECK(again_make(program, run_dir, JOB, geteuid() + 1));	/* what is below the mount is root's */
	CHECK(rmdir(job_dir) == 0 && rmdir(run_dir) == 0 && *was_told());
	CHECK(makes());
	CHECK_STRING(was_told(), wanted);
	CHECK(close(open_one) == 0);
}

static void test_it_fails(void)
{
	a_program("exit 3");
	CHECK(!makes() && *was_told());
	a_program("kill -9 $$");
	CHECK(!makes() && *was_told());
	CHECK(unlink(program) == 0 && !makes());
}

int main(void)
{
	CHECK(mkdtemp(top));
	(void)snprintf(run_dir, sizeof(run_dir), "%s/run", top);
	(void)snprintf(job_dir, sizeof(job_dir), "%s/run/%d", top, JOB);
	(void)snprintf(ledger, sizeof(ledger), "%s/run.agents", top);
	(void)snprintf(entry, sizeof(entry), "%s/run.agents/%d", top, JOB);
	(void)snprintf(program, sizeof(program), "%s/python", top);
	(void)snprintf(told, sizeof(told), "%s/told", top);
	CHECK(mkdir(run_dir, 0755) == 0);
	a_program("");
	test_nothing_is_run();
	test_it_is_run();
	test_it_fails();
	CHECK(unlink(entry) == 0 && rmdir(ledger) == 0 && rmdir(top) == 0);
	PASSED();
	return 0;
}
