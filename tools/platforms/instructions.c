// A plugin of qemu that prints how many instructions a program executed:
//   cc -shared -fPIC -O1 instructions.c -o instructions.so;  qemu-aarch64 -plugin ./instructions.so PROGRAM
// Declares what it uses of qemu's plugin interface, version 1, whose header few systems package.
#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef uint64_t plugin_id;
struct qemu_plugin_tb;
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct qemu_plugin_tb *));
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int op, void *counter, uint64_t add);
void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void *), void *);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

static uint64_t executed;

// Called once for every block of code, before it runs.
static void translated(plugin_id id, struct qemu_plugin_tb *block) {
    (void)id;
    const int add_u64 = 0;
    qemu_plugin_register_vcpu_tb_exec_inline(block, add_u64, &executed, qemu_plugin_tb_n_insns(block));
}

static void at_exit(plugin_id id, void *unused) {
    (void)id, (void)unused;
    fprintf(stderr, "instructions: %" PRIu64 "\n", executed);
}

__attribute__((visibility("default"))) int qemu_plugin_install(plugin_id id, const void *info, int count, char **arguments) {
    (void)info, (void)count, (void)arguments;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, at_exit, NULL);
    return 0;
}
