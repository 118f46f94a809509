// The parts of the CUDA driver, NVRTC and cuBLASLt that Kiln calls, on the CPU. The kernels are in kernels.cpp.
#include "gpu.h"

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

asm(R"(
.text
.globl emulator_switch
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");

namespace emulator {

const size_t STACK = 64 << 10;

static void begin() {
    body(body_data);
    alive--;
    if (at_barrier && at_barrier == alive) std::fprintf(stderr, "emulator: a thread left before a barrier\n"), std::abort();
    yield(DONE);
    std::abort();
}

void run_block(int threads, Body f, void *data) {
    body = f;
    body_data = data;
    if ((int)fibres.size() < threads) fibres.resize(threads);
    while ((int)warps.size() < (threads + 31) / 32) warps.emplace_back();
    alive = threads;
    at_barrier = 0;
    for (int i = 0; i < (int)fibres.size(); i++) {
        Fibre &fibre = fibres[i];
        if (i >= threads) {
            fibre.state = DONE;
            continue;
        }
        if (!fibre.stack) fibre.stack = aligned_alloc(64, STACK);
        void **top = (void **)((char *)fibre.stack + STACK);
        // As after a call: the stack pointer is 8 off a multiple of 16 when `begin` starts.
        *--top = nullptr;
        *--top = (void *)begin;
        for (int r = 0; r < 6; r++) *--top = nullptr;
        fibre.at = top;
        fibre.state = READY;
        fibre.groups.clear();
        fibre.open.clear();
        fibre.index = {(unsigned)(i % blockDim.x), (unsigned)(i / blockDim.x % blockDim.y), 0};
    }
    for (auto &warp : warps) warp.arrived = 0;
    for (auto &n : named_barriers) n = {};
    barriers.clear();
    int left = threads;
    // Results that depend on the order of threads between barriers are races; reverse order may expose them.
    static const bool reverse = std::getenv("KILN_EMULATOR_REVERSE") != nullptr;
    while (left) {
        bool moved = false;
        for (int n = 0; n < threads; n++) {
            int i = reverse ? threads - 1 - n : n;
            if (fibres[i].state != READY) continue;
            moved = true;
            current = i;
            threadIdx = fibres[i].index;
            emulator_switch(&scheduler, fibres[i].at);
            if (fibres[i].state == DONE) left--;
        }
        if (!moved) std::fprintf(stderr, "emulator: threads wait for each other\n"), std::abort();
    }
}

struct TiledMap {
    u64 at, sizes[5], strides[4];
    uint32_t rank, size, box[5];
};
static_assert(sizeof(TiledMap) <= 128);

// Calls `visit` with each element of a box: its address, or null outside the tensor, and its place in shared memory.
template <class F> int visit_box(const TiledMap &m, unsigned shared, const int *at, F visit) {
    if (shared % 1024) std::fprintf(stderr, "emulator: a box is not aligned\n"), std::abort();
    int boxes[3] = {(int)m.box[0], m.rank > 1 ? (int)m.box[1] : 1, m.rank > 2 ? (int)m.box[2] : 1}, bytes = 0;
    for (int z = 0; z < boxes[2]; z++)
        for (int y = 0; y < boxes[1]; y++)
            for (int x = 0; x < boxes[0]; x++, bytes += m.size) {
                long long place[3] = {at[0] + x, at[1] + y, at[2] + z};
                bool valid = true;
                u64 global = m.at + m.size * place[0];
                for (unsigned i = 0; i < m.rank; i++) {
                    valid = valid && place[i] >= 0 && place[i] < (long long)m.sizes[i];
                    if (i) global += place[i] * m.strides[i - 1];
                }
                visit(valid ? (void *)global : nullptr, dynamic_shared + swizzled(shared + bytes, m.box[0] * m.size));
            }
    return bytes;
}

int tma_load(unsigned to, const void *map, const int *at) {
    const TiledMap &m = *(const TiledMap *)map;
    return visit_box(m, to, at, [&](void *global, void *shared) {
        if (global)
            std::memcpy(shared, global, m.size);
        else
            std::memset(shared, 0, m.size);
    });
}

void tma_store(const void *map, unsigned from, const int *at) {
    const TiledMap &m = *(const TiledMap *)map;
    visit_box(m, from, at, [&](void *global, void *shared) {
        if (global) std::memcpy(global, shared, m.size);
    });
}

} // namespace emulator

std::map<std::string, Kernel> &kernels();

namespace {
std::mutex lock;
void *launched_arguments;
Kernel *launched;

typedef std::vector<std::function<int()>> GraphWork;

// While a stream is captured, its work is stored, not executed. Waits and host copies invalidate the capture.
struct Stream {
    bool captured = false, invalidated = false;
    GraphWork work;
};
const int UNSUPPORTED = 900, INVALIDATED = 901;

int submit(void *stream, std::function<int()> work) {
    auto *s = (Stream *)stream;
    if (!s->captured) return work();
    return s->work.push_back(work), 0;
}
int reject_capture(void *stream) {
    auto *s = (Stream *)stream;
    if (s->captured) s->invalidated = true;
    return s->captured ? UNSUPPORTED : 0;
}

int run_kernel(Kernel *kernel, Index grid, Index block, unsigned shared, void **arguments) {
    std::lock_guard<std::mutex> guard(lock);
    launched = kernel;
    launched_arguments = arguments;
    static std::vector<unsigned char> memory;
    memory.assign(shared + 1024, 0xff);
    emulator::dynamic_shared = (unsigned char *)(((u64)memory.data() + 1023) / 1024 * 1024);
    gridDim = grid;
    blockDim = block;
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                blockIdx = {x, y, z};
                auto call = [](void *) { launched->call((void **)launched_arguments); };
                emulator::run_block(block.x * block.y * block.z, call, nullptr);
            }
    return 0;
}

// A launch with copied arguments.
std::function<int()> captured_launch(Kernel *kernel, Index grid, Index block, unsigned shared, void **arguments) {
    std::vector<std::shared_ptr<void>> copies;
    for (size_t i = 0; i < kernel->sizes.size(); i++) {
        void *copy = aligned_alloc(64, (kernel->sizes[i] + 63) / 64 * 64);
        std::memcpy(copy, arguments[i], kernel->sizes[i]);
        copies.emplace_back(copy, std::free);
    }
    return [=] {
        std::vector<void *> pointers;
        for (auto &copy : copies) pointers.push_back(copy.get());
        return run_kernel(kernel, grid, block, shared, pointers.data());
    };
}
} // namespace

// Compute capability times ten: 9.0, or what KILN_EMULATOR_CAPABILITY says, such as 12.0.
static int capability() {
    static const char *text = std::getenv("KILN_EMULATOR_CAPABILITY");
    return text ? (int)std::lround(10 * std::atof(text)) : 90;
}
static int shared_bytes() { return capability() == 90 ? 227 << 10 : 99 << 10; }

extern "C" {
int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int *v) { return *v = 13000, 0; }
int cuDeviceGetCount(int *n) { return *n = 1, 0; }
int cuDeviceGet(int *d, int i) { return *d = i, 0; }
int cuDeviceGetName(char *name, int, int) { return std::strcpy(name, "Emulated GPU"), 0; }
int cuDeviceGetAttribute(int *v, int which, int) {
    *v = which == 16 ? 4 : which == 75 ? capability() / 10 : which == 76 ? capability() % 10 : which == 97 ? shared_bytes() : 0;
    return 0;
}
int cuDeviceTotalMem_v2(size_t *n, int) { return *n = 8ull << 30, 0; }
int cuDevicePrimaryCtxRetain(void **c, int) { return *c = (void *)1, 0; }
int cuDevicePrimaryCtxRelease_v2(int) { return 0; }
int cuCtxSetCurrent(void *) { return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { return *free = *total = 8ull << 30, 0; }
int cuMemAlloc_v2(u64 *p, size_t n) {
    void *block = aligned_alloc(512, (n + 511) / 512 * 512);
    if (!block) return 2;
    // NaN, so that reads of uninitialised memory show.
    std::memset(block, 0xff, n);
    return *p = (u64)block, 0;
}
int cuMemFree_v2(u64 p) { return std::free((void *)p), 0; }
int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t n, void *stream) {
    int status = reject_capture(stream);
    return status ? status : (std::memcpy((void *)to, from, n), 0);
}
int cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t n, void *stream) {
    int status = reject_capture(stream);
    return status ? status : (std::memcpy(to, (void *)from, n), 0);
}
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t n, void *stream) {
    return submit(stream, [=] { return std::memmove((void *)to, (void *)from, n), 0; });
}
int cuMemHostAlloc(void **p, size_t n, unsigned) { return *p = std::malloc(n), *p ? 0 : 2; }
int cuMemFreeHost(void *p) { return std::free(p), 0; }
int cuStreamCreate(void **s, unsigned) { return *s = new Stream(), 0; }
int cuStreamDestroy_v2(void *s) { return delete (Stream *)s, 0; }
int cuStreamSynchronize(void *s) { return reject_capture(s); }
int cuStreamWaitEvent(void *s, void *, unsigned) { return reject_capture(s); }
int cuStreamBeginCapture_v2(void *stream, int mode) {
    auto *s = (Stream *)stream;
    if (s->captured || mode < 0 || mode > 2) return 1;
    *s = Stream();
    return s->captured = true, 0;
}
int cuStreamEndCapture(void *stream, void **graph) {
    auto *s = (Stream *)stream;
    if (!s->captured) return 1;
    bool invalidated = s->invalidated;
    *graph = invalidated ? nullptr : new GraphWork(s->work);
    *s = Stream();
    return invalidated ? INVALIDATED : 0;
}
int cuGraphInstantiateWithFlags(void **executable, void *graph, u64) { return *executable = new GraphWork(*(GraphWork *)graph), 0; }
int cuGraphLaunch(void *executable, void *stream) {
    if (int status = reject_capture(stream)) return status;
    for (auto &work : *(GraphWork *)executable)
        if (int status = work()) return status;
    return 0;
}
int cuGraphDestroy(void *graph) { return delete (GraphWork *)graph, 0; }
int cuGraphExecDestroy(void *executable) { return delete (GraphWork *)executable, 0; }
int cuEventCreate(void **e, unsigned) { return *e = (void *)3, 0; }
int cuEventRecord(void *, void *s) { return reject_capture(s); }
int cuEventQuery(void *) { return 0; }
int cuEventSynchronize(void *) { return 0; }
int cuEventElapsedTime(float *t, void *, void *) { return *t = 1.0f, 0; }
int cuEventDestroy_v2(void *) { return 0; }
int cuModuleLoadData(void **m, const void *) { return *m = (void *)4, 0; }
int cuModuleUnload(void *) { return 0; }
int cuModuleGetFunction(void **f, void *, const char *name) {
    auto found = kernels().find(name);
    if (found == kernels().end()) return 500;
    return *f = &found->second, 0;
}
int cuFuncSetAttribute(void *f, int which, int value) {
    if (which != 8 || value > shared_bytes()) return 1;
    return ((Kernel *)f)->shared = value, 0;
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **arguments, void **) {
    auto *kernel = (Kernel *)f;
    if (!gx || !gy || !gz || gx > 0x7fffffff || gy > 65535 || gz > 65535 || bx * by * bz > 1024 || bx * by * bz == 0) return 1;
    if ((int)shared > kernel->shared) return 1;
    Index grid = {gx, gy, gz}, block = {bx, by, bz};
    if (!((Stream *)stream)->captured) return run_kernel(kernel, grid, block, shared, arguments);
    return submit(stream, captured_launch(kernel, grid, block, shared, arguments));
}
int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *at, const u64 *sizes, const u64 *strides,
                           const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int, int fill) {
    if ((type != 9 && type != 0) || rank < 2 || rank > 3 || (u64)at % 16 || (u64)map % 64 || interleave || swizzle < 1 || swizzle > 3 || fill) return 1;
    emulator::TiledMap m = {(u64)at};
    m.rank = rank;
    for (unsigned i = 0; i < rank; i++) {
        if (!sizes[i] || !box[i] || box[i] > 256 || steps[i] != 1 || (i && strides[i - 1] % 16)) return 1;
        m.sizes[i] = sizes[i], m.box[i] = box[i];
        if (i) m.strides[i - 1] = strides[i - 1];
    }
    m.size = type == 0 ? 1 : 2;
    if (box[0] * m.size != 16u << swizzle) return 1;
    return std::memcpy(map, &m, sizeof m), 0;
}
int cuGetErrorName(int, const char **s) { return *s = "EMULATED_ERROR", 0; }
int cuGetErrorString(int, const char **s) { return *s = "refused by the emulator", 0; }

int nvrtcVersion(int *major, int *minor) { return *major = 99, *minor = 9, 0; }
int nvrtcGetNumSupportedArchs(int *n) { return *n = 1, 0; }
int nvrtcGetSupportedArchs(int *archs) { return *archs = capability(), 0; }
int nvrtcCreateProgram(void **p, const char *, const char *, int, const char *const *, const char *const *) {
    return *p = (void *)5, 0;
}
int nvrtcDestroyProgram(void **) { return 0; }
int nvrtcCompileProgram(void *, int, const char *const *) { return 0; }
int nvrtcGetProgramLogSize(void *, size_t *n) { return *n = 0, 0; }
int nvrtcGetProgramLog(void *, char *) { return 0; }
int nvrtcGetCUBINSize(void *, size_t *n) { return *n = 8, 0; }
int nvrtcGetCUBIN(void *, char *s) { return std::memcpy(s, "emulated", 8), 0; }
int nvrtcGetPTXSize(void *, size_t *n) { return *n = 8, 0; }
int nvrtcGetPTX(void *, char *s) { return std::memcpy(s, "emulated", 8), 0; }
const char *nvrtcGetErrorString(int) { return "refused by the emulator"; }

struct Description {
    int ops[2] = {}, modes[2] = {};
    const float *scales[2] = {};
};
struct Layout {
    int type;
    u64 rows, cols;
    long long ld, stride;
    int batch;
};
size_t cublasLtGetVersion() { return 990000; }
int cublasLtCreate(void **h) { return *h = (void *)6, 0; }
int cublasLtDestroy(void *) { return 0; }
int cublasLtMatrixLayoutCreate(void **l, int type, u64 rows, u64 cols, long long ld) {
    return *l = new Layout{type, rows, cols, ld, 0, 1}, 0;
}
int cublasLtMatrixLayoutDestroy(void *l) { return delete (Layout *)l, 0; }
int cublasLtMatrixLayoutSetAttribute(void *l, int which, const void *value, size_t size) {
    auto *layout = (Layout *)l;
    if (which == 5 && size == 4) return layout->batch = *(const int *)value, 0;
    if (which == 6 && size == 8) return layout->stride = *(const long long *)value, 0;
    return 7;
}
int cublasLtMatmulDescCreate(void **d, int compute, int scale) {
    if (compute != 68 || scale != 0) return 7;
    return *d = new Description(), 0;
}
int cublasLtMatmulDescDestroy(void *d) { return delete (Description *)d, 0; }
int cublasLtMatmulDescSetAttribute(void *d, int which, const void *value, size_t size) {
    auto *description = (Description *)d;
    if ((which == 17 || which == 18) && size == 8) return description->scales[which - 17] = *(float *const *)value, 0;
    if (which == 25 && size == 1) return 0;
    if ((which == 31 || which == 32) && size == 4) return description->modes[which - 31] = *(const int *)value, 0;
    if ((which != 3 && which != 4) || size != 4) return 7;
    return description->ops[which - 3] = *(const int *)value, 0;
}
int cublasLtMatmulPreferenceCreate(void **p) { return *p = (void *)7, 0; }
int cublasLtMatmulPreferenceDestroy(void *) { return 0; }
int cublasLtMatmulPreferenceSetAttribute(void *, int which, const void *, size_t size) {
    return (which == 1 && size == 8) || (which >= 5 && which <= 8 && size == 4) ? 0 : 7;
}
struct HeuristicResult {
    u64 algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int wanted, HeuristicResult *results, int *found) {
    *found = wanted < 2 ? wanted : 2;
    for (int i = 0; i < *found; i++) results[i] = {{(u64)i + 1}, 0, 0, 1.0f, {}};
    return 0;
}
int cublasLtMatmulAlgoCheck(void *, void *, void *, void *, void *, void *, const u64 *algorithm, HeuristicResult *result) {
    if (algorithm[0] != 1 && algorithm[0] != 2) return 15;
    *result = {{algorithm[0]}, 0, 0, 1.0f, {}};
    return 0;
}
static int multiply(const Description &description, float alpha, const void *a, const Layout &A, const void *b, const Layout &B,
                    float beta, const void *c, const Layout &C, void *d, const Layout &D, u64 algorithm) {
    const int *ops = description.ops;
    if (algorithm != 1 && algorithm != 2) return 15;
    bool transposed = ops[0] == 1, b_transposed = ops[1] == 1;
    u64 m = transposed ? A.cols : A.rows, k = transposed ? A.rows : A.cols;
    u64 b_rows = b_transposed ? B.cols : B.rows, b_cols = b_transposed ? B.rows : B.cols;
    if (b_rows != k || D.rows != m || D.cols != b_cols || C.rows != m || C.type != D.type || A.type != B.type) return 7;
    if (A.type == 28 && (!transposed || b_transposed || k % 16 || description.modes[0] != description.modes[1])) return 7;
    bool scaled = description.modes[0] == 3;
    if (scaled && (!description.scales[0] || !description.scales[1])) return 7;
    auto get = [](const void *p, int type, long long i) {
        if (type == 28) {
            unsigned char bits = ((const unsigned char *)p)[i];
            float y = std::ldexp(__uint_as_float((unsigned)(bits & 0x7f) << 20), 120);
            return bits & 0x80 ? -y : y;
        }
        return type == 14 ? __uint_as_float((unsigned)((const unsigned short *)p)[i] << 16) : ((const float *)p)[i];
    };
    std::vector<float> left(m * k), right(k);
    for (int batch = 0; batch < D.batch; batch++) {
        for (u64 i = 0; i < m; i++)
            for (u64 j = 0; j < k; j++)
                left[i * k + j] = get(a, A.type, batch * A.stride + (transposed ? j + i * A.ld : i + j * A.ld));
        for (u64 n = 0; n < D.cols; n++) {
            for (u64 j = 0; j < k; j++) right[j] = get(b, B.type, batch * B.stride + (b_transposed ? n + j * B.ld : j + n * B.ld));
            for (u64 i = 0; i < m; i++) {
                double sums[8] = {};
                for (u64 j = 0; j < k; j++) sums[j % 8] += left[i * k + j] * right[j];
                double sum = 0;
                for (double s : sums) sum += s;
                sum *= alpha;
                if (scaled) sum *= (double)description.scales[0][i] * description.scales[1][n];
                if (beta != 0) sum += beta * get(c, C.type, batch * C.stride + i + n * C.ld);
                long long at = batch * D.stride + i + n * D.ld;
                if (D.type == 14)
                    ((unsigned short *)d)[at] = float_to_bf16((float)sum);
                else
                    ((float *)d)[at] = (float)sum;
            }
        }
    }
    return 0;
}
int cublasLtMatmul(void *, void *desc, const float *alpha, const void *a, void *la, const void *b, void *lb, const float *beta,
                   const void *c, void *lc, void *d, void *ld, const u64 *algorithm, void *, size_t, void *stream) {
    Description description = *(const Description *)desc;
    Layout A = *(Layout *)la, B = *(Layout *)lb, C = *(Layout *)lc, D = *(Layout *)ld;
    float scale = *alpha, added = *beta;
    u64 chosen = algorithm ? algorithm[0] : 1;
    return submit(stream, [=] { return multiply(description, scale, a, A, b, B, added, c, C, d, D, chosen); });
}
}
