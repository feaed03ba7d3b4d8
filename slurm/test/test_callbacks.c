/* What sbatch, salloc and srun pass on; each case in a process of its own, as in Slurm. */
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test/callbacks.h"
#include "test/check.h"
#include "test/spank_stub.h"

static struct spank_handle handle;

static void start(enum spank_context context)
{
	stub_reset(context);
	CHECK(slurm_spank_init(&handle, 0, NULL) == 0);
}

static void give(const char *option, const char *text)
{
	CHECK(stub_option(option, text, 0) == 0);
}

static void finish(void)
{
	CHECK(slurm_spank_init_post_opt(&handle, 0, NULL) == 0);
}

static void passes_on(enum spank_context context)
{
	start(context);
	give("gemini-replicas", "2");
	give("gemini-tier", "/lustre/a b;$(x)");
	give("gemini-tier-interval", "600");
	give("gemini-hang", "off");
	give("gemini-after", "17");
	finish();
	CHECK(stub_message_count() == 1);
	CHECK(strstr(stub_messages(), "note: --gemini-tier="));
	CHECK_STRING(stub_control_getenv("GEMINI_REPLICAS"), "2");
	CHECK_STRING(stub_control_getenv("GEMINI_TIER"), "/lustre/a b;$(x)");
	CHECK_STRING(stub_control_getenv("GEMINI_TIER_INTERVAL"), "600");
	CHECK_STRING(stub_control_getenv("GEMINI_HANG"), "off");
	CHECK_STRING(stub_control_getenv("GEMINI_AFTER"), "17");
	CHECK_STRING(getenv("GEMINI_REPLICAS"), "2");
	CHECK_STRING(getenv("SLURM_GEMINI_REPLICAS"), "2");
	CHECK_STRING(getenv("SLURM_GEMINI_TIER"), "/lustre/a b;$(x)");
	CHECK_STRING(getenv("SLURM_GEMINI_TIER_INTERVAL"), "600");
	CHECK_STRING(getenv("SLURM_GEMINI_HANG"), "off");
	CHECK_STRING(getenv("SLURM_GEMINI_AFTER"), "17");
}

static void parity_is_passed_on(void)
{
	setenv("SLURM_GEMINI_REDUNDANCY", "xor", 1);	/* inherited */
	start(S_CTX_ALLOCATOR);
	give("gemini-redundancy", "xor:3");
	finish();
	CHECK(stub_message_count() == 0);
	CHECK_STRING(stub_control_getenv("GEMINI_REPLICAS"), "3");
	CHECK_STRING(stub_control_getenv("GEMINI_REDUNDANCY"), "xor");
	CHECK_STRING(getenv("SLURM_GEMINI_REPLICAS"), "3");
	CHECK_STRING(getenv("SLURM_GEMINI_REDUNDANCY"), "xor");
}

static void copies_are_the_usual_thing(void)
{
	setenv("SLURM_GEMINI_REDUNDANCY", "xor", 1);
	start(S_CTX_ALLOCATOR);
	give("gemini-redundancy", "xor:3");
	give("gemini-redundancy", "replicate");
	give("gemini-replicas", "2");
	finish();
	CHECK_STRING(stub_control_getenv("GEMINI_REPLICAS"), "2");
	CHECK_STRING(stub_control_getenv("GEMINI_REDUNDANCY"), NULL);
	CHECK_STRING(getenv("SLURM_GEMINI_REDUNDANCY"), NULL);
}

static void parity_and_copies(void)
{
	start(S_CTX_ALLOCATOR);
	give("gemini-redundancy", "xor");
	give("gemini-replicas", "2");
	finish();
}

static void spares_are_passed_on(void)
{
	setenv("SBATCH_NO_KILL", "1", 1);
	start(S_CTX_ALLOCATOR);
	give("gemini-replicas", "2");
	give("gemini-spares", "1");
	finish();
	CHECK(stub_message_count() == 0);
	CHECK_STRING(stub_control_getenv("GEMINI_SPARES"), "1");
	CHECK_STRING(getenv("GEMINI_SPARES"), "1");
	CHECK_STRING(getenv("SLURM_GEMINI_SPARES"), "1");
	CHECK_STRING(getenv("SLURM_NO_KILL"), "set");
}

/* This is no sbatch: which options it was given cannot be said. */
static void spares_need_no_kill_where_that_may_be_there(void)
{
	start(S_CTX_ALLOCATOR);
	give("gemini-replicas", "2");
	give("gemini-spares", "1");
	finish();
	CHECK(stub_message_count() == 1);
	CHECK_STRING(stub_control_getenv("GEMINI_SPARES"), "1");
}

static void spares_alone(void)
{
	setenv("SBATCH_NO_KILL", "1", 1);
	start(S_CTX_ALLOCATOR);
	give("gemini-spares", "1");
	finish();
}

static void a_spare_has_no_ranks_to_inherit(void)
{
	setenv("SLURM_GEMINI_SPARES", "1", 1);
	setenv("SLURM_NO_KILL", "1", 1);
	start(S_CTX_ALLOCATOR);
	finish();
	CHECK_STRING(getenv("SLURM_NO_KILL"), NULL);
	CHECK_STRING(getenv("SLURM_GEMINI_SPARES"), NULL);
}

static void sbatch(void)
{
	passes_on(S_CTX_ALLOCATOR);
}

static void srun_alone(void)
{
	passes_on(S_CTX_LOCAL);
}

static void without_options(void)
{
	setenv("GEMINI_REPLICAS", "7", 1);	/* the user's own, for code that runs without Slurm */
	setenv("RANK", "3", 1);
	start(S_CTX_ALLOCATOR);
	finish();
	CHECK(stub_message_count() == 0);
	CHECK_STRING(stub_control_getenv("GEMINI_REPLICAS"), NULL);
	CHECK_STRING(getenv("SLURM_GEMINI_REPLICAS"), NULL);
	CHECK_STRING(getenv("GEMINI_REPLICAS"), "7");
	CHECK_STRING(getenv("RANK"), "3");
}

static void sbatch_in_protected_task(void)
{
	static const char *const inherited[] = { "GEMINI_REPLICAS", "SLURM_GEMINI_REPLICAS", "GEMINI_SOCKET",
						 "GEMINI_EPOCH", "GEMINI_RANKS_OF", "RANK", "WORLD_SIZE", "LOCAL_RANK",
						 "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT" };
	const size_t count = sizeof(inherited) / sizeof(inherited[0]);

	for (size_t i = 0; i < count; i++)
		setenv(inherited[i], "1", 1);
	start(S_CTX_ALLOCATOR);
	finish();
	for (size_t i = 0; i < count; i++)
		CHECK_STRING(getenv(inherited[i]), NULL);
}

static void srun_in_allocation(void)
{
	setenv("SLURM_JOB_ID", "5", 1);
	setenv("SLURM_GEMINI_REPLICAS", "2", 1);
	setenv("GEMINI_REPLICAS", "2", 1);
	start(S_CTX_LOCAL);
	give("gemini-replicas", "2");
	finish();
	CHECK(stub_message_count() == 0);
	CHECK_STRING(stub_control_getenv("GEMINI_REPLICAS"), NULL);
	give("gemini-hang", "60");
	finish();
	CHECK(stub_message_count() == 1);
	give("gemini-replicas", "3");
	finish();
	CHECK(stub_message_count() == 2);
	CHECK(strstr(stub_messages(), "belong to the allocation"));
	CHECK_STRING(getenv("SLURM_GEMINI_REPLICAS"), "2");
	CHECK_STRING(getenv("GEMINI_REPLICAS"), "2");
}

static void tier_alone(void)
{
	start(S_CTX_ALLOCATOR);
	give("gemini-tier", "/x");
	finish();
}

static void interval_alone(void)
{
	start(S_CTX_LOCAL);
	give("gemini-replicas", "2");
	give("gemini-tier-interval", "60");
	finish();
}

static void hang_alone(void)
{
	start(S_CTX_ALLOCATOR);
	give("gemini-hang", "300");
	finish();
}

static void after_alone(void)
{
	start(S_CTX_ALLOCATOR);
	give("gemini-after", "17");
	finish();
}

static void one_note(const char *option, const char *text, const char *words)
{
	start(S_CTX_ALLOCATOR);
	give("gemini-replicas", "2");
	give(option, text);
	finish();
	CHECK(stub_message_count() == (words ? 1 : 0));
	CHECK(!words || strstr(stub_messages(), words));
}

static void surprises_are_noted(void)
{
	one_note("gemini-replicas", "1", "note: --gemini-replicas=1 keeps no copy on another node");
	one_note("gemini-hang", "5", "note: --gemini-hang=5: the step starts again");
}

static void a_tier_that_does_not_exist(void)
{
	one_note("gemini-tier", "/nonexist/a;$(x)", "note: --gemini-tier=/nonexist/a;$(x) does not exist on this host");
}

static void a_tier_that_exists(void)
{
	one_note("gemini-tier", "/tmp", NULL);
}

static void daemons(void)
{
	start(S_CTX_SLURMD);
	finish();
	CHECK(slurm_spank_task_init(&handle, 0, NULL) == 0);
	start(S_CTX_JOB_SCRIPT);
	finish();
	CHECK(slurm_spank_task_init(&handle, 0, NULL) == 0);
	CHECK(stub_message_count() == 0);
}

static int status_of(void (*test)(void))
{
	const pid_t child = fork();
	int status;

	if (child == 0) {
		unsetenv("SLURM_JOB_ID");
		test();
		exit(0);
	}
	CHECK(child > 0 && waitpid(child, &status, 0) == child);
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int main(void)
{
	CHECK(status_of(sbatch) == 0);
	CHECK(status_of(srun_alone) == 0);
	CHECK(status_of(without_options) == 0);
	CHECK(status_of(sbatch_in_protected_task) == 0);
	CHECK(status_of(srun_in_allocation) == 0);
	CHECK(status_of(daemons) == 0);
	CHECK(status_of(parity_is_passed_on) == 0);
	CHECK(status_of(copies_are_the_usual_thing) == 0);
	CHECK(status_of(parity_and_copies) == EXIT_FAILURE);
	CHECK(status_of(spares_are_passed_on) == 0);
	CHECK(status_of(spares_need_no_kill_where_that_may_be_there) == 0);
	CHECK(status_of(spares_alone) == EXIT_FAILURE);
	CHECK(status_of(a_spare_has_no_ranks_to_inherit) == 0);
	CHECK(status_of(tier_alone) == EXIT_FAILURE);
	CHECK(status_of(interval_alone) == EXIT_FAILURE);
	CHECK(status_of(hang_alone) == EXIT_FAILURE);
	CHECK(status_of(after_alone) == EXIT_FAILURE);
	CHECK(status_of(surprises_are_noted) == 0);
	CHECK(status_of(a_tier_that_does_not_exist) == 0);
	CHECK(status_of(a_tier_that_exists) == 0);
	PASSED();
	return 0;
}
