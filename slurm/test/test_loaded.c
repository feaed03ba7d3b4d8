/* The finished plugin, loaded the way Slurm does it: symbols, names, and one option through them. */
#include <dlfcn.h>
#include <unistd.h>

#include "test/check.h"
#include "test/spank_stub.h"

int main(int argc, char **argv)
{
	static struct spank_handle handle;
	int (*init)(spank_t, int, char **);
	int (*post_opt)(spank_t, int, char **);
	const unsigned int *version;
	void *plugin;

	CHECK(argc == 2);
	plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
	if (!plugin) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	CHECK_STRING(dlsym(plugin, "plugin_name"), "gemini_hpc");
	CHECK_STRING(dlsym(plugin, "plugin_type"), "spank");
	version = dlsym(plugin, "plugin_version");
	CHECK(version && *version == SLURM_VERSION_NUMBER);
	CHECK(dlsym(plugin, "spank_plugin_version"));
	CHECK(dlsym(plugin, "slurm_spank_task_init"));
	CHECK(!dlsym(plugin, "map_parse") && !dlsym(plugin, "options_get") && !dlsym(plugin, "spank_options"));

	unsetenv("SLURM_JOB_ID");
	stub_reset(S_CTX_ALLOCATOR);
	*(void **)&init = dlsym(plugin, "slurm_spank_init");
	*(void **)&post_opt = dlsym(plugin, "slurm_spank_init_post_opt");
	CHECK(init && post_opt && init(&handle, 0, NULL) == 0);
	CHECK(stub_option("gemini-replicas", "zwei", 0) == -1);
	CHECK(stub_option("gemini-replicas", "2", 0) == 0);
	CHECK(post_opt(&handle, 0, NULL) == 0);
	CHECK_STRING(stub_control_getenv("GEMINI_REPLICAS"), "2");
	CHECK(dlclose(plugin) == 0);
	PASSED();
	return 0;
}
