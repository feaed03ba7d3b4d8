#include "again.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { POLL_MS = 10, LIMIT_MS = 5000, END_MS = 500, FILES_MAX = 65536 };

/*
 * Returns the kernel's number of a descriptor's mount, or -1 if it is not visible. Sends no request to any
 * file system.
 */
static long mount_of(int fd)
{
	static const char key[] = "mnt_id:";
	char path[64], text[512];
	const char *found;
	ssize_t got;
	int info;

	(void)snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
	info = open(path, O_RDONLY | O_CLOEXEC);
	if (info < 0)
		return -1;
	got = read(info, text, sizeof(text) - 1);
	(void)close(info);
	if (got <= 0)
		return -1;
	text[got] = '\0';
	found = strstr(text, key);
	return found ? strtol(found + sizeof(key) - 1, NULL, 10) : -1;
}

/* Leaves an entry with a mount of its own as it is: the mount is the prolog's, or a user's over it. */
static bool entry_is_gone(int run_dir, const char *name, uid_t owner)
{
	const int fd = openat(run_dir, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
	const long above = mount_of(run_dir);
	struct stat st;
	bool gone;

	if (fd < 0)
		return errno == ENOENT;
	gone = above >= 0 && mount_of(fd) == above && fstat(fd, &st) == 0 &&
	       (!S_ISDIR(st.st_mode) || st.st_uid != owner);
	(void)close(fd);
	return gone;
}

static bool is_gone(const char *run_dir, const char *name, uid_t owner)
{
	const int fd = open(run_dir, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	bool gone;

	if (fd < 0)
		return errno == ENOENT;
	gone = entry_is_gone(fd, name, owner);
	(void)close(fd);
	return gone;
}

/* Root's ledger lies beside the run directory: unmounting the run directory leaves it. */
static bool agent_is_known(const char *run_dir, const char *name)
{
	char path[PATH_MAX];
	struct stat st;

	(void)snprintf(path, sizeof(path), "%s.agents/%s", run_dir, name);
	return lstat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == geteuid();
}

/*
 * A step may have a billion descriptor numbers. Linux before 5.9 has no close_range; there only FILES_MAX are
 * closed.
 */
static void close_all_from(unsigned first)
{
#ifdef SYS_close_range
	if (syscall(SYS_close_range, first, ~0U, 0U) == 0)
		return;
#endif
	for (int fd = (int)first; fd < FILES_MAX; fd++)
		(void)close(fd);
}

/* Runs between fork and exec in a process with threads: only calls that are safe in a signal handler. */
static _Noreturn void become(const char *program, char *const argv[])
{
	static char path[] = "PATH=/usr/sbin:/usr/bin:/sbin:/bin", locale[] = "LC_ALL=C.UTF-8";
	char *const environment[] = { path, locale, NULL };
	const int null = open("/dev/null", O_RDWR);
	sigset_t none;

	(void)sigemptyset(&none);
	(void)sigprocmask(SIG_SETMASK, &none, NULL);
	(void)setsid();
	(void)umask(022);
	if (null < 0 || chdir("/") != 0)
		_exit(127);
	for (int fd = 0; fd < 3; fd++)
		if (dup2(null, fd) < 0)
			_exit(127);
	close_all_from(3);
	(void)execve(program, argv, environment);
	_exit(127);
}

/* Returns the exit status of a process that ends within the limit, -1 otherwise. */
static int status_within(pid_t pid, uint32_t limit_ms)
{
	const struct timespec poll = { .tv_nsec = POLL_MS * 1000000L };
	int status;

	for (uint32_t waited_ms = 0; waited_ms <= limit_ms; waited_ms += POLL_MS) {
		const pid_t ended = waitpid(pid, &status, WNOHANG);

		if (ended == pid)
			return status;
		if (ended < 0 && errno != EINTR)
			return -1;
		(void)nanosleep(&poll, NULL);
	}
	return -1;
}

static bool run(const char *program, char *const argv[])
{
	const pid_t pid = fork();
	int status;

	if (pid < 0)
		return false;
	if (pid == 0)
		become(program, argv);
	status = status_within(pid, LIMIT_MS);
	if (status == -1) {
		(void)kill(pid, SIGKILL);
		(void)status_within(pid, END_MS);
	}
	return status == 0;
}

bool again_make(const char *program, const char *run_dir, uint32_t job, uid_t owner)
{
	char name[16], uid[16], called[PATH_MAX];
	char isolated[] = "-I", module[] = "-m", again[] = "gemini_hpc.node.again";
	char *const argv[] = { called, isolated, module, again, name, uid, NULL };

	(void)snprintf(name, sizeof(name), "%" PRIu32, job);
	(void)snprintf(uid, sizeof(uid), "%" PRIuMAX, (uintmax_t)owner);
	(void)snprintf(called, sizeof(called), "%s", program);
	return agent_is_known(run_dir, name) && is_gone(run_dir, name, owner) && run(program, argv);
}
