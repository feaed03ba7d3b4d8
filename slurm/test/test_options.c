/* Which values the options accept, and what is said of the others. */
#include "options.h"

#include "number.h"
#include "test/callbacks.h"
#include "test/check.h"
#include "test/spank_stub.h"

static struct spank_handle handle;

static const struct {
	const char *option, *text;
} refused[] = {
	{ "gemini-replicas", "0" },
	{ "gemini-spares", "-1" },
	{ "gemini-spares", "1025" },
	{ "gemini-replicas", "-1" },
	{ "gemini-replicas", "x" },
	{ "gemini-replicas", "33" },
	{ "gemini-replicas", "99" },
	{ "gemini-replicas", "" },
	{ "gemini-replicas", " 2" },
	{ "gemini-replicas", "2 " },
	{ "gemini-replicas", "2x" },
	{ "gemini-replicas", "+2" },
	{ "gemini-replicas", "02" },
	{ "gemini-replicas", "0x2" },
	{ "gemini-replicas", "2.0" },
	{ "gemini-replicas", "2\n" },
	{ "gemini-replicas", "4294967298" },
	{ "gemini-replicas", "18446744073709551618" },
	{ "gemini-replicas", "99999999999999999999999999999999999999999999999999" },
	{ "gemini-tier", "" },
	{ "gemini-tier", "relative" },
	{ "gemini-tier", "./x" },
	{ "gemini-tier", "/a\nb" },
	{ "gemini-tier", "/a\tb" },
	{ "gemini-tier", "/a\x7f" },
	{ "gemini-tier", "/a\x1b[31m" },
	{ "gemini-tier", "/a'b" },
	{ "gemini-tier", "/a\"b" },
	{ "gemini-tier", "/a`b" },
	{ "gemini-tier", "/a\\b" },
	{ "gemini-tier", "/\xc3\xa4" },
	{ "gemini-tier-interval", "0" },
	{ "gemini-tier-interval", "-5" },
	{ "gemini-tier-interval", "604801" },
	{ "gemini-tier-interval", "1h" },
	{ "gemini-tier-interval", "Auto" },
	{ "gemini-tier-interval", "auto " },
	{ "gemini-tier-interval", "automatic" },
	{ "gemini-tier-interval", "" },
	{ "gemini-hang", "0" },
	{ "gemini-hang", "604801" },
	{ "gemini-hang", "5m" },
	{ "gemini-hang", "OFF" },
	{ "gemini-hang", "off " },
	{ "gemini-hang", "" },
	{ "gemini-after", "0" },
	{ "gemini-redundancy", "" },
	{ "gemini-redundancy", "rs:" },
	{ "gemini-redundancy", "rs:4" },
	{ "gemini-redundancy", "rs:4+" },
	{ "gemini-redundancy", "rs:+2" },
	{ "gemini-redundancy", "rs:0+2" },
	{ "gemini-redundancy", "rs:4+0" },
	{ "gemini-redundancy", "rs:4+5" },
	{ "gemini-redundancy", "rs:29+4" },
	{ "gemini-redundancy", "rs:04+2" },
	{ "gemini-redundancy", "rs:4+2+1" },
	{ "gemini-redundancy", "rs:4+2;reboot" },
	{ "gemini-redundancy", "xor:" },
	{ "gemini-redundancy", "xor:1" },
	{ "gemini-redundancy", "xor:33" },
	{ "gemini-redundancy", "xor:04" },
	{ "gemini-redundancy", "xor4" },
	{ "gemini-redundancy", "xor:4;reboot" },
	{ "gemini-redundancy", "Xor" },
	{ "gemini-after", "-1" },
	{ "gemini-after", "017" },
	{ "gemini-after", "17_3" },
	{ "gemini-after", "17;reboot" },
	{ "gemini-after", "4294967296" },
	{ "gemini-after", "" },
};

static const struct {
	const char *option, *text;
} accepted[] = {
	{ "gemini-replicas", "1" },
	{ "gemini-replicas", "2" },
	{ "gemini-replicas", "32" },
	{ "gemini-tier", "/" },
	{ "gemini-tier", "/lustre/some user/$(x);&|*" },
	{ "gemini-tier-interval", "1" },
	{ "gemini-tier-interval", "604800" },
	{ "gemini-tier-interval", "auto" },
	{ "gemini-hang", "1" },
	{ "gemini-hang", "604800" },
	{ "gemini-hang", "off" },
	{ "gemini-spares", "0" },
	{ "gemini-spares", "1024" },
	{ "gemini-redundancy", "replicate" },
	{ "gemini-redundancy", "xor" },
	{ "gemini-redundancy", "xor:2" },
	{ "gemini-redundancy", "xor:32" },
	{ "gemini-redundancy", "rs:4+2" },
	{ "gemini-redundancy", "rs:1+1" },
	{ "gemini-redundancy", "rs:28+4" },
	{ "gemini-after", "1" },
	{ "gemini-after", "4294967295" },
};

static void test_values(enum spank_context context)
{
	for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
		stub_reset(context);
		CHECK(slurm_spank_init(&handle, 0, NULL) == 0);
		CHECK(stub_options_registered() == 7);
		CHECK(stub_option(refused[i].option, refused[i].text, 0) == -1);
		CHECK(stub_message_count() == 1);
		CHECK(strncmp(stub_messages(), "gemini-hpc: --gemini-", 21) == 0);
		CHECK(strstr(stub_messages(), refused[i].option));
		CHECK(strchr(stub_messages(), '\n') == stub_messages() + strlen(stub_messages()) - 1);
		CHECK(!strchr(stub_messages(), '\x1b'));
	}
	for (size_t i = 0; i < sizeof(accepted) / sizeof(accepted[0]); i++) {
		stub_reset(context);
		CHECK(slurm_spank_init(&handle, 0, NULL) == 0);
		CHECK(stub_option(accepted[i].option, accepted[i].text, 0) == 0);
		CHECK(stub_message_count() == 0);
	}
}

static void test_length(void)
{
	static char path[TIER_MAX + 2];

	memset(path, 'a', sizeof(path) - 1);
	path[0] = '/';
	stub_reset(S_CTX_ALLOCATOR);
	CHECK(slurm_spank_init(&handle, 0, NULL) == 0);
	CHECK(stub_option("gemini-tier", path, 0) == -1);
	path[TIER_MAX] = '\0';
	CHECK(stub_option("gemini-tier", path, 0) == 0);
	CHECK_STRING(options_get()->text[OPTION_TIER], path);
}

static void test_last_one_counts(void)
{
	stub_reset(S_CTX_LOCAL);
	CHECK(slurm_spank_init(&handle, 0, NULL) == 0);
	CHECK(stub_option("gemini-replicas", "4", 0) == 0);	/* from the environment */
	CHECK(stub_option("gemini-replicas", "2", 0) == 0);	/* from the command line */
	CHECK(options_get()->replicas == 2);
	CHECK(stub_option("gemini-replicas", "0", 0) == -1);
	CHECK(options_get()->replicas == 2);
	/* A step's copy was checked at submission and is not used. */
	CHECK(stub_option("gemini-replicas", "rubbish", 1) == 0);
	CHECK(options_get()->replicas == 2);
	CHECK(stub_option("gemini-replicas", NULL, 0) == -1);
}

static void test_numbers(void)
{
	uint64_t value;

	CHECK(number_parse_string("18446744073709551615", 0, UINT64_MAX, &value) && value == UINT64_MAX);
	CHECK(!number_parse_string("18446744073709551616", 0, UINT64_MAX, &value));
	CHECK(number_parse_string("0", 0, 9, &value) && value == 0);
	CHECK(!number_parse_string("00", 0, 9, &value));
}

static void test_site_arguments(void)
{
	char good[] = "run_dir=/somewhere", relative[] = "run_dir=x", unknown[] = "rundir=/x", empty[] = "run_dir=";
	char *bad[] = { relative, unknown, empty };
	char *argv[] = { good };

	stub_reset(S_CTX_ALLOCATOR);
	CHECK(slurm_spank_init(&handle, 1, argv) == 0);
	for (size_t i = 0; i < 3; i++) {
		stub_reset(S_CTX_ALLOCATOR);
		argv[0] = bad[i];
		CHECK(slurm_spank_init(&handle, 1, argv) == -1);
		CHECK(stub_message_count() == 1);
		CHECK(strstr(stub_messages(), "gemini-hpc: plugstack.conf: "));
		/* The options stay known, so that jobs which use them are not refused as nonsense. */
		CHECK(stub_options_registered() == 7);
		CHECK(slurm_spank_init_post_opt(&handle, 1, argv) == 0);
	}
}

/* A required plugin whose init fails there drains the node. */
static void test_no_failure_where_it_drains_the_node(void)
{
	static const enum spank_context daemons[] = { S_CTX_REMOTE, S_CTX_SLURMD, S_CTX_JOB_SCRIPT };
	char unknown[] = "rundir=/x";
	char *argv[] = { unknown };

	for (size_t i = 0; i < sizeof(daemons) / sizeof(daemons[0]); i++) {
		stub_reset(daemons[i]);
		CHECK(slurm_spank_init(&handle, 1, argv) == 0);
		CHECK(stub_message_count() == 1);
		CHECK(slurm_spank_init_post_opt(&handle, 1, argv) == 0);
		CHECK(slurm_spank_task_init(&handle, 1, argv) == 0);

		stub_reset(daemons[i]);
		while (stub_options_registered() < STUB_OPTIONS_MAX)	/* other plugins have taken the place */
			CHECK(slurm_spank_init(&handle, 0, NULL) == 0);
		CHECK(slurm_spank_init(&handle, 0, NULL) == 0);
		CHECK(stub_message_count() > 0);
	}
}

int main(void)
{
	static const enum spank_context all[] = { S_CTX_LOCAL, S_CTX_REMOTE, S_CTX_ALLOCATOR, S_CTX_SLURMD,
						  S_CTX_JOB_SCRIPT };

	for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		test_values(all[i]);
	test_length();
	test_last_one_counts();
	test_numbers();
	test_site_arguments();
	test_no_failure_where_it_drains_the_node();
	PASSED();
	return 0;
}
