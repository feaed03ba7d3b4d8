/* What a task of a protected job gets to see. */
#include <fcntl.h>
#include <limits.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <slurm/slurm.h>

#include "job_env.h"
#include "test/callbacks.h"
#include "test/check.h"
#include "test/spank_stub.h"

enum { JOB = 123 };

static const char good_map[] =
	"GEMINI_MAP 1\n"
	"job=123\nrestart=0\nnodes=3\nnodelist=n[1-3]\nnoderanks=0,2,1\nnoderank=2\nmaster_addr=n1\n"
	"master_port=23456\nsocket=/run/gemini-hpc/123/agent.sock\nagent_port=17004\nepoch=4\nhash=00ffAA\n"
	"something_new=yes\n";

static struct spank_handle handle;
static char run_dir[] = "/tmp/gemini-spank-test-XXXXXX";
static char map_path[PATH_MAX];
static char waiting_path[PATH_MAX];
static char socket_path[PATH_MAX];
static char job_dir[PATH_MAX];

static void write_map(const char *text)
{
	const int fd = open(map_path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW, 0600);

	CHECK(fd >= 0);
	CHECK(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
	CHECK(close(fd) == 0);
}

static void remove_map(void)
{
	(void)unlink(map_path);
}

/* The second node of three, layout 2,2,1; its second task. */
static void a_task(uint32_t step)
{
	static char argument[PATH_MAX];
	char *argv[] = { argument };

	(void)snprintf(argument, sizeof(argument), "run_dir=%s", run_dir);
	stub_reset(S_CTX_REMOTE);
	CHECK(slurm_spank_init(&handle, 1, argv) == 0);
	stub_task = (struct stub_task){ .job = JOB, .step = step, .local_tasks = 2, .total_tasks = 5 };
	stub_setenv("SLURM_GEMINI_REPLICAS", "2");
	stub_setenv("SLURM_JOB_NUM_NODES", "3");
	stub_setenv("SLURM_PROCID", "3");
	stub_setenv("SLURM_NODEID", "1");
	stub_setenv("SLURM_LOCALID", "1");
	stub_setenv("SLURM_STEP_NUM_NODES", "3");
	stub_setenv("SLURM_STEP_NODELIST", "n[1-3]");
	stub_setenv("SLURM_STEP_TASKS_PER_NODE", "2(x2),1");
}

static void run(void)
{
	CHECK(slurm_spank_task_init(&handle, 0, NULL) == 0);
	CHECK(stub_message_count() == 0);
}

static void check_place(bool exported)
{
	CHECK_STRING(stub_getenv("GEMINI_SOCKET"), exported ? "/run/gemini-hpc/123/agent.sock" : NULL);
	CHECK_STRING(stub_getenv("GEMINI_NODE_RANK"), exported ? "2" : NULL);
	CHECK_STRING(stub_getenv("GEMINI_NODES"), exported ? "3" : NULL);
	CHECK_STRING(stub_getenv("GEMINI_EPOCH"), exported ? "4" : NULL);
	CHECK_STRING(stub_getenv("GEMINI_RESTART"), exported ? "0" : NULL);
}

static void check_no_ranks(void)
{
	for (size_t i = 0; job_env_ranks[i]; i++)
		CHECK_STRING(stub_getenv(job_env_ranks[i]), NULL);
	CHECK_STRING(stub_getenv("GEMINI_RANKS_OF"), NULL);
}

/* Of the task that `a_task` has made: by Slurm it is the fourth of five, its node the second of n[1-3]. */
static void check_ranks_by_slurm(const char *port, const char *ranks_of)
{
	CHECK_STRING(stub_getenv("RANK"), "3");
	CHECK_STRING(stub_getenv("WORLD_SIZE"), "5");
	CHECK_STRING(stub_getenv("LOCAL_RANK"), "1");
	CHECK_STRING(stub_getenv("LOCAL_WORLD_SIZE"), "2");
	CHECK_STRING(stub_getenv("MASTER_ADDR"), "n1");
	CHECK_STRING(stub_getenv("MASTER_PORT"), port);
	CHECK_STRING(stub_getenv("GEMINI_RANKS_OF"), ranks_of);
}

static void test_ranks(void)
{
	write_map(good_map);
	a_task(18);
	run();
	check_place(true);
	/* Node ranks 0,2,1 with 2,2,1 tasks: node 0 has 0-1, node 2 has 2, this one has 3-4. */
	CHECK_STRING(stub_getenv("RANK"), "4");
	CHECK_STRING(stub_getenv("WORLD_SIZE"), "5");
	CHECK_STRING(stub_getenv("LOCAL_RANK"), "1");
	CHECK_STRING(stub_getenv("LOCAL_WORLD_SIZE"), "2");
	CHECK_STRING(stub_getenv("MASTER_ADDR"), "n1");
	CHECK_STRING(stub_getenv("MASTER_PORT"), "23458");	/* 23456 + 18 % 16 */
	CHECK_STRING(stub_getenv("GEMINI_RANKS_OF"), "123.0.18");
	CHECK_STRING(stub_getenv("GEMINI_REPLICAS"), "2");
	CHECK_STRING(stub_getenv("SLURM_PROCID"), "3");
}

static void note(const char *text)
{
	char directory[PATH_MAX], path[PATH_MAX + 16];
	FILE *file;

	(void)snprintf(directory, sizeof(directory), "%s.unprotected", run_dir);
	(void)mkdir(directory, 0755);
	(void)snprintf(path, sizeof(path), "%s/%d", directory, JOB);
	if (!text) {
		CHECK(unlink(path) == 0 && rmdir(directory) == 0);
		return;
	}
	file = fopen(path, "w");
	CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void says_as(const char *procid, const char *local_id, const char *inherited, const char *message,
		    const char *why)
{
	remove_map();
	a_task(0);
	stub_setenv("SLURM_PROCID", procid);
	stub_setenv("SLURM_LOCALID", local_id);
	stub_setenv("SLURMD_NODENAME", "n2");
	if (inherited)
		stub_setenv("GEMINI_UNPROTECTED", inherited);
	CHECK(slurm_spank_task_init(&handle, 0, NULL) == 0);
	CHECK(stub_message_count() == (message ? 1 : 0));
	if (message)
		CHECK(strstr(stub_messages(), message) != NULL);
	CHECK_STRING(stub_getenv("GEMINI_UNPROTECTED"), why);
	check_place(false);
}

static void says(const char *local_id, const char *inherited, const char *message, const char *why)
{
	says_as("3", local_id, inherited, message, why);
}

static void test_why(void)
{
	static const char nothing_left[] = "the prolog on n2 started no agent and left no reason: run gemini-hpc doctor there";
	static const char *const none[] = { "1 of another incarnation\n", "0\n", "0 \n", "" };
	static const char long_one[] = "0 xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
				       "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
				       "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
				       "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n";

	if (geteuid() != 0)	/* only root's word counts */
		return;
	note("0 python3 is missing on this node\n");
	says("0", NULL, "this job is not protected on n2: python3 is missing on this node",
	     "python3 is missing on this node");
	says("1", NULL, NULL, "python3 is missing on this node");
	says("0", "python3 is missing on this node", NULL, "python3 is missing on this node");
	note("0 \033[2Jx\ty\nsecond line\n");
	says("0", NULL, "n2: ?[2Jx?y", "?[2Jx?y");
	/* What lies elsewhere is said by one voice, and not of this node. */
	note("0 elsewhere: no agent can be reached on n3\n");
	says("0", NULL, NULL, "no agent can be reached on n3");
	says_as("0", "0", NULL, "this job is not protected: no agent can be reached on n3", "no agent can be reached on n3");
	CHECK(strstr(stub_messages(), "n2") == NULL);
	says_as("0", "0", "no agent can be reached on n3", NULL, "no agent can be reached on n3");
	for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
		note(none[i]);
		says("0", NULL, NULL, nothing_left);
		says_as("0", "0", NULL, nothing_left, nothing_left);
		says_as("0", "0", nothing_left, NULL, nothing_left);
	}
	note(long_one);
	remove_map();
	a_task(0);
	stub_setenv("SLURM_LOCALID", "0");
	CHECK(slurm_spank_task_init(&handle, 0, NULL) == 0);
	CHECK(strlen(stub_getenv("GEMINI_UNPROTECTED")) == 255);
	note("0 stale\n");
	write_map(good_map);
	a_task(0);
	stub_setenv("GEMINI_UNPROTECTED", "inherited");
	run();
	CHECK_STRING(stub_getenv("GEMINI_UNPROTECTED"), NULL);
	note(NULL);
}

/* A job that has asked for nothing: not a byte of its environment changes, whatever is set and lies about. */
static void test_unprotected_job(void)
{
	static const char *const theirs[] = { "GEMINI_REPLICAS", "GEMINI_SOCKET", "GEMINI_UNPROTECTED",
					      "GEMINI_RANKS_OF", "RANK", "MASTER_PORT", "SLURM_GEMINI_SPARES" };
	char *before;

	for (size_t with = 0; with <= sizeof(theirs) / sizeof(theirs[0]); with++) {
		if (with % 2)
			write_map(good_map);
		else
			remove_map();
		a_task(0);
		CHECK(spank_unsetenv(&handle, "SLURM_GEMINI_REPLICAS") == ESPANK_SUCCESS);
		for (size_t i = 0; i < with; i++)
			stub_setenv(theirs[i], "9");
		before = strdup(stub_environment());
		run();
		CHECK_STRING(stub_environment(), before);
		free(before);
	}
}

static void test_scripts(void)
{
	static const uint32_t scripts[] = { SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP };

	for (size_t i = 0; i < 2; i++) {
		write_map(good_map);
		a_task(scripts[i]);
		run();
		check_place(true);
		check_no_ranks();
	}
	a_task(SLURM_EXTERN_CONT);
	run();
	check_place(false);
	remove_map();
	for (size_t i = 0; i < 2; i++) {
		a_task(scripts[i]);
		run();
		check_no_ranks();
	}
}

/* Without a map: what is set stays, and where Slurm's figures do not say it all, nothing is exported. */
static void test_other_steps_without_a_map(void)
{
	static char huge[2 << 20];
	static const char *const changes[][2] = {
		{ "SLURM_STEP_NUM_NODES", "2" },
		{ "SLURM_STEP_NUM_NODES", "0" },
		{ "SLURM_JOB_NUM_NODES", "4" },
		{ "SLURM_PROCID", "5" },
		{ "SLURM_PROCID", "-1" },
		{ "SLURM_PROCID", "4294967296" },
		{ "SLURM_NODEID", "3" },
		{ "SLURM_LOCALID", "2" },
		{ "SLURM_LOCALID", "" },
		{ "SLURM_STEP_NODELIST", "" },
		{ "SLURM_STEP_NODELIST", "n[" },
		{ "SLURM_STEP_NODELIST", "$(id)" },
		{ "SLURM_STEP_NODELIST", huge },
		{ "SLURM_STEP_NUM_NODES", huge },
		{ "SLURM_PROCID", huge },
		{ "SLURM_DISTRIBUTION", "arbitrary" },
		{ "SLURM_GEMINI_SPARES", "1" },
		{ "RANK", "0" },
		{ "RANK", "" },
		{ "WORLD_SIZE", "5" },
		{ "LOCAL_RANK", "0" },
		{ "LOCAL_WORLD_SIZE", "2" },
		{ "MASTER_ADDR", "elsewhere" },
		{ "MASTER_PORT", "29500" },
	};

	remove_map();
	memset(huge, '1', sizeof(huge) - 1);
	for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
		a_task(0);
		stub_setenv(changes[i][0], changes[i][1]);
		run();
		CHECK_STRING(stub_getenv("GEMINI_RANKS_OF"), NULL);
		for (size_t k = 0; job_env_ranks[k]; k++)
			CHECK_STRING(stub_getenv(job_env_ranks[k]),
				     strcmp(job_env_ranks[k], changes[i][0]) == 0 ? changes[i][1] : NULL);
	}
	a_task(0);
	stub_setenv("SLURM_DISTRIBUTION", "cyclic");
	run();
	check_ranks_by_slurm("29776", "123.0.0");
}

/* Steps that are not the whole job, or whose figures do not agree: place yes, ranks no. */
static void test_other_steps(void)
{
	static const char *const changes[][2] = {
		{ "SLURM_STEP_NUM_NODES", "2" },
		{ "SLURM_STEP_NODELIST", "n[1-2]" },
		{ "SLURM_STEP_NODELIST", "n1,n2,n3" },
		{ "SLURM_STEP_TASKS_PER_NODE", "2(x2)" },
		{ "SLURM_STEP_TASKS_PER_NODE", "2(x2),2" },
		{ "SLURM_STEP_TASKS_PER_NODE", "1,3,1" },
		{ "SLURM_STEP_TASKS_PER_NODE", "2(x99999999999),1" },
		{ "SLURM_STEP_TASKS_PER_NODE", "" },
		{ "SLURM_NODEID", "2" },	/* node rank 1, and the map says that this is 2 */
		{ "SLURM_NODEID", "7" },
		{ "SLURM_LOCALID", "2" },
		{ "SLURM_LOCALID", "x" },
		{ "RANK", "0" },
		{ "RANK", "" },
		{ "WORLD_SIZE", "5" },
		{ "LOCAL_RANK", "0" },
		{ "LOCAL_WORLD_SIZE", "2" },
		{ "MASTER_ADDR", "elsewhere" },
		{ "MASTER_PORT", "29500" },
	};

	write_map(good_map);
	for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
		a_task(0);
		stub_setenv(changes[i][0], changes[i][1]);
		run();
		check_place(true);
		CHECK_STRING(stub_getenv("GEMINI_RANKS_OF"), NULL);
		for (size_t k = 0; job_env_ranks[k]; k++)
			CHECK_STRING(stub_getenv(job_env_ranks[k]),
				     strcmp(job_env_ranks[k], changes[i][0]) == 0 ? changes[i][1] : NULL);
	}
}

static void test_nested_step(void)
{
	write_map(good_map);
	a_task(1);
	for (size_t i = 0; job_env_ranks[i]; i++)
		stub_setenv(job_env_ranks[i], "77");
	stub_setenv("GEMINI_RANKS_OF", "123.0.0");
	stub_setenv("GEMINI_SOCKET", "/elsewhere");
	run();
	check_place(true);
	CHECK_STRING(stub_getenv("RANK"), "4");
	CHECK_STRING(stub_getenv("MASTER_PORT"), "23457");
	/* The same in a part of the job: what was inherited is gone, nothing takes its place. */
	a_task(1);
	for (size_t i = 0; job_env_ranks[i]; i++)
		stub_setenv(job_env_ranks[i], "77");
	stub_setenv("GEMINI_RANKS_OF", "123.0.0");
	stub_setenv("SLURM_STEP_NUM_NODES", "2");
	run();
	check_no_ranks();
	/* And without a map. */
	remove_map();
	a_task(1);
	for (size_t i = 0; job_env_ranks[i]; i++)
		stub_setenv(job_env_ranks[i], "77");
	stub_setenv("GEMINI_RANKS_OF", "123.0.0");
	run();
	check_ranks_by_slurm("29777", "123.0.1");
}

static void test_no_or_other_map(void)
{
	char text[sizeof(good_map)];

	remove_map();
	a_task(0);
	stub_setenv("GEMINI_SOCKET", "/of/another/job");
	run();
	check_place(false);
	check_ranks_by_slurm("29776", "123.0.0");	/* 24000 + 123 * 7 % 500 * 16 */

	write_map(good_map);
	a_task(18);
	stub_setenv("SLURM_RESTART_COUNT", "1");
	run();
	check_place(false);
	check_ranks_by_slurm("29794", "123.1.18");	/* the next block, and 18 % 16 */

	memcpy(text, good_map, sizeof(text));
	memcpy(strstr(text, "job=123"), "job=124", 7);
	write_map(text);
	a_task(0);
	run();
	check_place(false);

	memcpy(text, good_map, sizeof(text));
	memcpy(strstr(text, "restart=0"), "restart=1", 9);
	write_map(text);
	a_task(0);
	run();
	check_place(false);
	a_task(0);
	stub_setenv("SLURM_RESTART_COUNT", "1");
	run();
	CHECK_STRING(stub_getenv("GEMINI_RESTART"), "1");
	CHECK_STRING(stub_getenv("RANK"), "4");
	a_task(0);
	stub_setenv("SLURM_RESTART_COUNT", "one");
	run();
	check_place(false);
}

static void touch(const char *path)
{
	const int fd = open(path, O_WRONLY | O_CREAT | O_NOFOLLOW, 0600);

	CHECK(fd >= 0 && close(fd) == 0);
}

/* slurmd has skipped the prolog: the agent still waits, and is summoned a moment later. */
static void test_late_map(void)
{
	struct timespec began, ended;
	pid_t agent;

	remove_map();
	touch(waiting_path);
	agent = fork();
	if (agent == 0) {
		(void)usleep(200000);
		write_map(good_map);
		(void)unlink(waiting_path);
		_exit(0);
	}
	CHECK(agent > 0);
	a_task(0);
	run();
	check_place(true);
	CHECK_STRING(stub_getenv("RANK"), "4");
	CHECK(waitpid(agent, NULL, 0) == agent);

	/* The agents do not agree: the agent ends its waiting without a map. */
	remove_map();
	touch(waiting_path);
	agent = fork();
	if (agent == 0) {
		(void)usleep(200000);
		(void)unlink(waiting_path);
		_exit(0);
	}
	CHECK(agent > 0 && clock_gettime(CLOCK_MONOTONIC, &began) == 0);
	a_task(0);
	run();
	check_place(false);
	CHECK(clock_gettime(CLOCK_MONOTONIC, &ended) == 0 && ended.tv_sec - began.tv_sec < 5);
	CHECK(waitpid(agent, NULL, 0) == agent);

	/* A pipe, a link or a directory of that name is not an agent that waits. */
	CHECK(mkfifo(waiting_path, 0600) == 0);
	a_task(0);
	run();
	check_place(false);
	CHECK(unlink(waiting_path) == 0 && symlink("/etc/passwd", waiting_path) == 0);
	a_task(0);
	run();
	check_place(false);
	CHECK(unlink(waiting_path) == 0);
	CHECK(clock_gettime(CLOCK_MONOTONIC, &ended) == 0 && ended.tv_sec - began.tv_sec < 5);
}

/* The job's directory was made again, for this step or for another one at the same moment: the agent moves in. */
static void test_an_agent_that_moves(void)
{
	const struct timespec long_ago[] = { { .tv_sec = 1 }, { .tv_sec = 1 } };
	struct timespec began, ended;
	pid_t agent;

	remove_map();
	CHECK(unlink(socket_path) == 0);
	agent = fork();
	if (agent == 0) {
		(void)usleep(300000);
		write_map(good_map);
		_exit(0);
	}
	CHECK(agent > 0);
	a_task(0);
	run();
	check_place(true);
	CHECK(waitpid(agent, NULL, 0) == agent);

	/* An older directory is not waited for, nor a young one whose agent is there. */
	remove_map();
	CHECK(utimensat(AT_FDCWD, job_dir, long_ago, 0) == 0 && clock_gettime(CLOCK_MONOTONIC, &began) == 0);
	a_task(0);
	run();
	check_place(false);
	touch(socket_path);
	a_task(0);
	run();
	check_place(false);
	CHECK(clock_gettime(CLOCK_MONOTONIC, &ended) == 0 && ended.tv_sec - began.tv_sec < 2);
}

/* Places where a map must not be read from; with a time limit, as a pipe could block for ever. */
static void test_hostile_files(void)
{
	char elsewhere[PATH_MAX];
	char huge[1024];
	int fd;

	(void)alarm(20);
	(void)snprintf(elsewhere, sizeof(elsewhere), "%s/elsewhere", run_dir);
	remove_map();
	fd = open(elsewhere, O_WRONLY | O_CREAT | O_TRUNC, 0600);
	CHECK(fd >= 0 && write(fd, good_map, sizeof(good_map) - 1) > 0 && close(fd) == 0);
	CHECK(symlink(elsewhere, map_path) == 0);
	a_task(0);
	run();
	check_place(false);

	remove_map();
	CHECK(mkfifo(map_path, 0600) == 0);
	a_task(0);
	run();
	check_place(false);

	remove_map();
	CHECK(mkdir(map_path, 0700) == 0);
	a_task(0);
	run();
	check_place(false);
	CHECK(rmdir(map_path) == 0);

	write_map("");
	a_task(0);
	run();
	check_place(false);

	/* A valid map and a mebibyte of unknown keys. */
	write_map(good_map);
	fd = open(map_path, O_WRONLY | O_APPEND);
	memset(huge, 'x', sizeof(huge));
	huge[1] = '=';
	huge[sizeof(huge) - 1] = '\n';
	for (int i = 0; i < 1023; i++)
		CHECK(write(fd, huge, sizeof(huge)) == sizeof(huge));
	a_task(0);
	run();
	check_place(true);
	CHECK(write(fd, huge, sizeof(huge)) == sizeof(huge) && close(fd) == 0);
	a_task(0);
	run();
	check_place(false);

	if (geteuid() == 0) {
		write_map(good_map);
		CHECK(chown(map_path, 65534, 65534) == 0);
		a_task(0);
		run();
		check_place(false);
	}
	CHECK(unlink(elsewhere) == 0);
	remove_map();
	(void)alarm(0);
}

/* Exit status of a task that has more replicas than nodes, and how many lines it said. */
static int ended_with(const char *procid, uint32_t step, char *said, size_t size)
{
	int pipe_ends[2], status;
	ssize_t n, got = 0;
	pid_t child;

	CHECK(pipe(pipe_ends) == 0);
	child = fork();
	if (child == 0) {
		(void)dup2(pipe_ends[1], STDERR_FILENO);
		stub_echo = true;
		a_task(step);
		stub_setenv("SLURM_GEMINI_REPLICAS", "4");
		stub_setenv("SLURM_PROCID", procid);
		(void)slurm_spank_task_init(&handle, 0, NULL);
		_exit(0);
	}
	CHECK(close(pipe_ends[1]) == 0);
	while ((n = read(pipe_ends[0], said + got, size - 1 - (size_t)got)) > 0)
		got += n;
	said[got] = '\0';
	CHECK(close(pipe_ends[0]) == 0 && waitpid(child, &status, 0) == child);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void test_more_replicas_than_nodes(void)
{
	char said[1024];

	write_map(good_map);	/* made smaller while it ran: its agents are there */
	CHECK(ended_with("0", 0, said, sizeof(said)) == 0);
	CHECK_STRING(said, "");
	remove_map();
	CHECK(ended_with("0", 0, said, sizeof(said)) == 78);
	CHECK_STRING(said, "gemini-hpc: --gemini-replicas=4 wants 4 nodes, one per copy, and this job has 3: "
			   "ask for more nodes or fewer replicas\n");
	CHECK(ended_with("3", 0, said, sizeof(said)) == 78);
	CHECK_STRING(said, "");
	CHECK(ended_with("0", SLURM_BATCH_SCRIPT, said, sizeof(said)) == 78);
	CHECK(ended_with("0", SLURM_EXTERN_CONT, said, sizeof(said)) == 0);
}

static void test_het_job(void)
{
	write_map(good_map);
	a_task(0);
	stub_setenv("SLURM_HET_SIZE", "2");
	run();
	check_place(false);
	a_task(0);
	stub_setenv("SLURM_HET_SIZE", "2");
	stub_setenv("SLURM_PROCID", "0");
	stub_setenv("SLURM_GEMINI_REPLICAS", "30");	/* not even that ends the task */
	CHECK(slurm_spank_task_init(&handle, 0, NULL) == 0);
	CHECK(stub_message_count() == 1);
	CHECK(strstr(stub_messages(), "not protected"));
	check_place(false);
	check_no_ranks();
}

static void test_export_none(void)
{
	remove_map();
	a_task(0);
	stub_setenv("SLURM_GEMINI_TIER", "/lustre");
	stub_setenv("SLURM_GEMINI_TIER_INTERVAL", "60");
	run();
	CHECK_STRING(stub_getenv("GEMINI_REPLICAS"), "2");
	CHECK_STRING(stub_getenv("GEMINI_TIER"), "/lustre");
	CHECK_STRING(stub_getenv("GEMINI_TIER_INTERVAL"), "60");
}

int main(void)
{
	CHECK(mkdtemp(run_dir));
	(void)snprintf(job_dir, sizeof(job_dir), "%s/%d", run_dir, JOB);
	CHECK((size_t)snprintf(map_path, sizeof(map_path), "%.*s/map", 200, job_dir) < sizeof(map_path));
	CHECK((size_t)snprintf(waiting_path, sizeof(waiting_path), "%.*s/waiting", 200, job_dir) < sizeof(waiting_path));
	CHECK((size_t)snprintf(socket_path, sizeof(socket_path), "%.*s/agent.sock", 200, job_dir) < sizeof(socket_path));
	CHECK(mkdir(job_dir, 0700) == 0);
	touch(socket_path);
	test_ranks();
	test_unprotected_job();
	test_why();
	test_scripts();
	test_other_steps();
	test_other_steps_without_a_map();
	test_nested_step();
	test_no_or_other_map();
	test_late_map();
	test_an_agent_that_moves();
	test_hostile_files();
	test_more_replicas_than_nodes();
	test_het_job();
	test_export_none();
	remove_map();
	CHECK(unlink(socket_path) == 0);
	CHECK(rmdir(job_dir) == 0 && rmdir(run_dir) == 0);
	stub_reset(S_CTX_ERROR);
	PASSED();
	return 0;
}
