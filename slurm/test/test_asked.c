/* What a command line asks for, and where that is not said for sure. */
#include "asked.h"

#include <stdarg.h>
#include <unistd.h>

#include "test/check.h"

enum { NOT_SAID = 0 };

static struct asked everything;	/* of the last command line */

static uint32_t asked(const char *first, ...)
{
	char *argv[32] = { (char *)(uintptr_t)first };
	int argc = 1;
	va_list more;

	va_start(more, first);
	while ((argv[argc] = va_arg(more, char *)))
		argc++;
	va_end(more);
	everything = asked_by(argc, argv);
	return everything.most_nodes;
}

static char script_path[] = "/tmp/gemini-spank-nodes-XXXXXX";

static uint32_t script(const char *text)
{
	FILE *file = fopen(script_path, "w");

	CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
	return asked("sbatch", "--gemini-replicas=3", script_path, "-N7", NULL);
}

static void test_command_lines(void)
{
	CHECK(asked("sbatch", "-N2", "job.sh", NULL) == 2);
	CHECK(asked("/usr/bin/sbatch", "-N", "2", "job.sh", NULL) == 2);
	CHECK(asked("salloc", "--nodes=1-4", NULL) == 4);
	CHECK(asked("srun", "--nodes", "3", "-n", "12", "true", NULL) == 3);
	CHECK(asked("sbatch", "-N2", "-N5", "job.sh", NULL) == 5);
	CHECK(asked("sbatch", "--requeue", "-HN2", "job.sh", NULL) == 2);
	CHECK(asked("sbatch", "-J", "-N9", "-N2", "job.sh", NULL) == 2);
	CHECK(asked("sbatch", "--comment=-N9", "--unknown=-N8", "-N2", "x", "-N7", NULL) == 2);
	CHECK(asked("srun", "-l", "-N2", "true", "-N9", NULL) == 2);
	CHECK(asked("sbatch", "--nice", "-q", "-N9", "-N2", "job.sh", NULL) == 2);
	CHECK(asked("sbatch", "-N2", "--wrap", "srun -N1 true", NULL) == 2);
}

static void test_requeue(void)
{
	(void)asked("sbatch", "--no-requeue", "-N2", "job.sh", NULL);
	CHECK(everything.no_requeue);
	(void)asked("sbatch", "--no-requeue", "--requeue", "-N2", "job.sh", NULL);
	CHECK(!everything.no_requeue);
	(void)asked("sbatch", "-N2", "job.sh", "--no-requeue", NULL);
	CHECK(!everything.no_requeue);
	(void)script("#!/bin/sh\n#SBATCH --no-requeue\n");
	CHECK(everything.no_requeue);
}

static void test_nothing_for_sure(void)
{
	CHECK(asked("sbatch", "-n2", "/nowhere/job.sh", NULL) == NOT_SAID);
	CHECK(asked("sbatch", "/nowhere/job.sh", "-N2", NULL) == NOT_SAID);
	CHECK(asked("sbatch", "--some-new-option", "-N2", "job.sh", NULL) == NOT_SAID);
	CHECK(asked("sbatch", "-Y", "-N2", "job.sh", NULL) == NOT_SAID);
	CHECK(asked("sbatch", "-N2", ":", "-N3", "job.sh", NULL) == NOT_SAID);
	CHECK(asked("sbatch", "-N2k", "job.sh", NULL) == NOT_SAID);
	CHECK(asked("sbatch", "-N4-2", "job.sh", NULL) == NOT_SAID);
	CHECK(asked("sbatch", "-N", NULL) == NOT_SAID);
	CHECK(asked("sbatch", "--nodes=", NULL) == NOT_SAID);
	CHECK(asked("sbatch", "--", "-N2", NULL) == NOT_SAID);
	CHECK(asked("sbatch", "-", "-N2", NULL) == NOT_SAID);
	CHECK(asked("srun", "-l", "true", "-N2", NULL) == NOT_SAID);
	CHECK(asked("srun", "-W", "5", "-N2", "true", NULL) == NOT_SAID);
	CHECK(asked("sbatch", "--nice", "/nowhere/job.sh", "-N2", NULL) == NOT_SAID);
	CHECK(asked("python3", "-N2", NULL) == NOT_SAID);
	CHECK(asked("srun", "-n2", "true", NULL) == NOT_SAID);
	CHECK(asked("sbatch", "/dev/null", NULL) == NOT_SAID);
	CHECK(asked_by(0, NULL).most_nodes == NOT_SAID);
}

static void test_scripts(void)
{
	CHECK(script("#!/bin/sh\n#SBATCH -N2\nsrun true\n#SBATCH -N9\n") == 2);
	CHECK(script("#!/bin/sh\n# words\n\n#SBATCH --requeue --nodes=3 # of them\n#SBATCH -N 2 -t 1\n") == 2);
	CHECK(script("#!/bin/sh\n#SBATCH -N2-4\r\n") == 4);
	CHECK(script("#!/bin/sh\n#SBATCH --job-name=\"a b\"\n#SBATCH -N2\n") == 2);
	CHECK(script("#!/bin/sh\n#SBATCH -N2\n#SBATCH hetjob\n#SBATCH -N3\n") == NOT_SAID);
	CHECK(script("#!/bin/sh\n#SBATCH -N2\n#SBATCH -J 'x -N9'\n") == NOT_SAID);
	CHECK(script("#!/bin/sh\n#SBATCH -n2\nsrun true\n") == NOT_SAID);
	CHECK(script("#!/bin/sh\n##SBATCH -N2\ntrue\n") == NOT_SAID);
	CHECK(script("") == NOT_SAID);
	CHECK(asked("sbatch", "-N5", script_path, NULL) == 5);
}

static bool no_kill(uint32_t nodes)
{
	CHECK(everything.most_nodes == nodes);
	return everything.no_kill;
}

static void test_no_kill(void)
{
	CHECK(!no_kill(asked("sbatch", "-N2", "job.sh", NULL)));
	CHECK(no_kill(asked("sbatch", "--no-kill", "-N2", "job.sh", NULL)));
	CHECK(no_kill(asked("sbatch", "-kN2", "job.sh", NULL)));
	CHECK(no_kill(asked("salloc", "-N2", "-k", NULL)));
	CHECK(!no_kill(asked("sbatch", "--no-kill=off", "-N2", "job.sh", NULL)));
	CHECK(!no_kill(asked("sbatch", "-koff", "-N2", "job.sh", NULL)));
	CHECK(!no_kill(asked("sbatch", "-N2", "job.sh", "--no-kill", NULL)));
	CHECK(!no_kill(asked("sbatch", "--comment", "--no-kill", "-N2", "job.sh", NULL)));
	CHECK(!no_kill(script("#!/bin/sh\ntrue\n")) && everything.sure);
	CHECK(no_kill(asked("sbatch", "--gemini-spares", "1", "--no-kill", script_path, NULL)) && everything.sure);
	CHECK(no_kill(asked("sbatch", "--cpus-per-gpu", "1", "--no-kill", script_path, NULL)) && everything.sure);
	CHECK(!no_kill(asked("sbatch", "--some-new-option", "--no-kill", script_path, NULL)) && !everything.sure);
	CHECK(no_kill(script("#!/bin/sh\n#SBATCH -N2\n#SBATCH --no-kill\nsrun true\n")));
	CHECK(no_kill(script("#!/bin/sh\n#SBATCH -k\n#SBATCH -J 'x y'\n")));
	CHECK(!no_kill(asked("sbatch", "--no-kill=off", script_path, NULL)));
	CHECK(!no_kill(script("#!/bin/sh\n#SBATCH -N2\nsrun --no-kill true\n")));
	CHECK(!no_kill(asked("sbatch", "-N2", "--wrap", "true", NULL)) && everything.sure);
	CHECK(!no_kill(asked("sbatch", "-N2", NULL)) && !everything.sure);	/* the script comes from a pipe */
}

int main(void)
{
	const int fd = mkstemp(script_path);

	CHECK(fd >= 0 && close(fd) == 0);
	test_command_lines();
	test_requeue();
	test_nothing_for_sure();
	test_scripts();
	test_no_kill();
	CHECK(asked_here().most_nodes == NOT_SAID);	/* this is neither sbatch nor srun */
	CHECK(unlink(script_path) == 0);
	PASSED();
	return 0;
}
