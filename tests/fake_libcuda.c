// A stand-in for libcuda.so.1 where there is no GPU: enough of the driver to compile a Mosaic
// GPU kernel for Hopper and to load and "launch" it. A launch runs nothing: it is written down,
// for the caller to ask what the driver was given. One device, numbered 0.
#include <stdint.h>
#include <string.h>

typedef int CUresult;
enum { SUCCESS = 0, INVALID_CONTEXT = 201, NOT_FOUND = 500 };
enum { MAJOR = 75, MINOR = 76, DYNAMIC_SHARED_BYTES = 8 };  // attributes of device and function

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void *stream;
} LaunchConfig;  // the head of CUlaunchConfig

enum { DEPTH = 8, PARAMETERS = 64 };
static _Thread_local void *contexts[DEPTH];
static _Thread_local int depth;
static _Thread_local int capture_mode;

// All of 64 bits, for the reader's ease: the latest module, then the latest launch.
static struct {
  uint64_t capture_mode, shared_bytes;
  uint64_t launches, function, stream, context, parameters[PARAMETERS];
} record;
static int parameter_count;
static char primary, module, function;

// For the tests: how many pointers the next launch takes, and what was written down.
void fake_expect(int count) { parameter_count = count; }
void fake_record(uint64_t *out) { memcpy(out, &record, sizeof record); }
int fake_depth(void) { return depth; }

CUresult cuInit(unsigned flags) { return SUCCESS; }
CUresult cuDriverGetVersion(int *out) { return *out = 13000, SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char **out) { return *out = "FAKE", SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **out) { return *out = "fake", SUCCESS; }

CUresult cuDeviceGetCount(int *out) { return *out = 1, SUCCESS; }
CUresult cuDeviceGet(int *out, int ordinal) { return *out = 0, SUCCESS; }
CUresult cuDeviceGetAttribute(int *out, int attribute, int device) {
  *out = attribute == MAJOR ? 9 : attribute == MINOR ? 0 : 232448;
  return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(void **out, int device) { return *out = &primary, SUCCESS; }
CUresult cuCtxPushCurrent_v2(void *context) {
  if (depth == DEPTH) return INVALID_CONTEXT;
  contexts[depth++] = context;
  return SUCCESS;
}
CUresult cuCtxPopCurrent_v2(void **out) {
  if (!depth) return INVALID_CONTEXT;
  *out = contexts[--depth];
  return SUCCESS;
}
CUresult cuCtxGetCurrent(void **out) { return *out = depth ? contexts[depth - 1] : 0, SUCCESS; }
CUresult cuCtxGetDevice(int *out) { return *out = 0, depth ? SUCCESS : INVALID_CONTEXT; }
CUresult cuThreadExchangeStreamCaptureMode(int *mode) {
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return SUCCESS;
}

CUresult cuModuleLoadData(void **out, const void *image) {
  if (!depth) return INVALID_CONTEXT;
  record.capture_mode = capture_mode;
  record.shared_bytes = 0;
  *out = &module;
  return SUCCESS;
}
CUresult cuModuleGetGlobal_v2(void *address, void *bytes, void *in, const char *name) {
  return NOT_FOUND;
}
CUresult cuModuleGetFunction(void **out, void *in, const char *name) {
  return *out = &function, SUCCESS;
}
CUresult cuFuncSetAttribute(void *in, int attribute, int value) {
  if (attribute == DYNAMIC_SHARED_BYTES) record.shared_bytes = value;
  return SUCCESS;
}
CUresult cuFuncLoad(void *in) { return depth ? SUCCESS : INVALID_CONTEXT; }
CUresult cuTensorMapEncodeTiled(void *map) { return memset(map, 0, 128), SUCCESS; }

CUresult cuLaunchKernelEx(const LaunchConfig *config, void *in, void **parameters, void *_) {
  if (!depth) return INVALID_CONTEXT;
  record.launches++;
  record.function = (uint64_t)in;
  record.stream = (uint64_t)config->stream;
  record.context = (uint64_t)contexts[depth - 1];
  for (int i = 0; i < parameter_count; i++) record.parameters[i] = *(uint64_t *)parameters[i];
  return SUCCESS;
}
