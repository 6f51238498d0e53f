// A stand-in for libcuda.so.1 that writes down what it is told, and runs nothing. With it the
// compiler of JAX's CUDA plugin makes machine code for Hopper on any machine, and its launcher
// shows how the code is to be launched: the image, the function and its attributes, the tensor
// maps, the grid. Tests launch against it too. One device, numbered 0; it refuses what a driver
// would refuse. Each call below with a `say` adds a line of JSON to the log.
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
enum { SUCCESS = 0, INVALID_VALUE = 1, INVALID_IMAGE = 200, INVALID_CONTEXT = 201, NOT_FOUND = 500 };
enum { MAJOR = 75, MINOR = 76, SHARED_BYTES = 232448 };  // two attributes of a device, one answer
enum { DEPTH = 8, PARAMETERS = 64, NO_BITS = 8 };        // NO_BITS: a section without bytes

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void *stream, *attributes;
  unsigned attribute_count;
} LaunchConfig;  // CUlaunchConfig

typedef struct {
  unsigned number, padding, value[16];
} LaunchAttribute;  // CUlaunchAttribute

// What a tensor map holds here, in the 128 bytes in which a driver packs the same.
typedef struct {
  uint64_t base, dims[5], strides[4];  // strides in bytes, of dims 1 and after
  uint16_t box[5];
  uint8_t steps[5], type, rank, interleave, swizzle, l2, oob;
} TensorMap;

static _Thread_local void *contexts[DEPTH];
static _Thread_local int depth;
static _Thread_local int capture_mode;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *text;
static size_t used, room;
static void **images;
static int image_count, function_count, quiet, parameter_count, parameter_bytes[PARAMETERS];
static char failing[64];
static CUresult failure;
static char primary, module;
static void *capturing;  // a stream

// For the caller.

// The log. It and the images that it tells of stay until the next `recorder_clear`.
const char *recorder_log(void) { return text ? text : ""; }
void recorder_clear(void) {
  while (image_count) free(images[--image_count]);
  used = 0;
  if (text) *text = 0;
}
// How many bytes each parameter of the next launches has.
void recorder_expect(int count, const int *bytes) {
  parameter_count = count;
  memcpy(parameter_bytes, bytes, count * sizeof *bytes);
}
// From now on the function of this name only returns `error`; 0 ends that.
void recorder_fail(const char *name, CUresult error) {
  snprintf(failing, sizeof failing, "%s", name);
  failure = error;
}
// Whether launches are written down, which takes longer than they do.
void recorder_quiet(int value) { quiet = value; }
int recorder_depth(void) { return depth; }
// From now on this stream is captured; 0: none.
void recorder_capture(void *stream) { capturing = stream; }

static void say(const char *format, ...) {
  va_list arguments;
  if (room - used < 1 << 14) text = realloc(text, room += 1 << 16);
  va_start(arguments, format);
  used += vsnprintf(text + used, room - used, format, arguments);
  va_end(arguments);
}
#define FAILS() \
  if (failure && !strcmp(failing, __func__)) return failure

// The driver.

CUresult cuInit(unsigned flags) { return SUCCESS; }
CUresult cuDriverGetVersion(int *out) { return *out = 13000, SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char **out) {
  *out = error == INVALID_VALUE     ? "CUDA_ERROR_INVALID_VALUE"
         : error == INVALID_IMAGE   ? "CUDA_ERROR_INVALID_IMAGE"
         : error == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
                                    : "CUDA_ERROR_STAND_IN";
  return SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **out) {
  return *out = "words of the stand-in", SUCCESS;
}

CUresult cuDeviceGetCount(int *out) { return *out = 1, SUCCESS; }
CUresult cuDeviceGet(int *out, int ordinal) { return *out = 0, SUCCESS; }
CUresult cuDeviceGetAttribute(int *out, int attribute, int device) {
  *out = attribute == MAJOR ? 9 : attribute == MINOR ? 0 : SHARED_BYTES;
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

// Bytes of an ELF image: the end of its last section or table.
static uint64_t elf_bytes(const unsigned char *image) {
  uint64_t segments, sections;
  uint16_t sizes[4];  // of a segment's head, how many; of a section's head, how many
  memcpy(&segments, image + 32, 8);
  memcpy(&sections, image + 40, 8);
  memcpy(sizes, image + 54, 8);
  uint64_t end = segments + sizes[0] * sizes[1], table = sections + sizes[2] * sizes[3];
  if (table > end) end = table;
  for (int i = 0; i < sizes[3]; i++) {
    uint32_t type;
    uint64_t place[2];
    memcpy(&type, image + sections + i * sizes[2] + 4, 4);
    memcpy(place, image + sections + i * sizes[2] + 24, 16);
    if (type != NO_BITS && place[0] + place[1] > end) end = place[0] + place[1];
  }
  return end;
}

CUresult cuModuleLoadData(void **out, const void *image) {
  FAILS();
  if (!depth) return INVALID_CONTEXT;
  if (memcmp(image, "\177ELF", 4)) return INVALID_IMAGE;
  uint64_t bytes = elf_bytes(image);
  pthread_mutex_lock(&lock);
  images = realloc(images, (image_count + 1) * sizeof *images);
  images[image_count] = memcpy(malloc(bytes), image, bytes);
  say("{\"call\": \"cuModuleLoadData\", \"image\": %llu, \"bytes\": %llu, \"capture_mode\": %d}\n",
      (unsigned long long)images[image_count++], (unsigned long long)bytes, capture_mode);
  pthread_mutex_unlock(&lock);
  *out = &module;
  return SUCCESS;
}
CUresult cuModuleUnload(void *in) { return SUCCESS; }
CUresult cuModuleGetGlobal_v2(void *address, void *bytes, void *in, const char *name) {
  return NOT_FOUND;
}
CUresult cuModuleGetFunction(void **out, void *in, const char *name) {
  FAILS();
  pthread_mutex_lock(&lock);
  *out = (void *)(uintptr_t)(0x1000 + 16 * function_count++);
  say("{\"call\": \"cuModuleGetFunction\", \"name\": \"%s\", \"function\": %llu}\n", name,
      (unsigned long long)*out);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
CUresult cuFuncSetAttribute(void *in, int attribute, int value) {
  FAILS();
  pthread_mutex_lock(&lock);
  say("{\"call\": \"cuFuncSetAttribute\", \"attribute\": %d, \"value\": %d}\n", attribute, value);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
CUresult cuFuncLoad(void *in) { return depth ? SUCCESS : INVALID_CONTEXT; }

CUresult cuTensorMapEncodeTiled(void *out, int type, uint32_t rank, void *base,
                                const uint64_t *dims, const uint64_t *strides,
                                const uint32_t *box, const uint32_t *steps, int interleave,
                                int swizzle, int l2, int oob) {
  FAILS();
  if ((uintptr_t)out % 64 || (uintptr_t)base % 16 || !rank || rank > 5) return INVALID_VALUE;
  TensorMap map = {(uint64_t)base};
  map.type = type, map.rank = rank, map.interleave = interleave, map.swizzle = swizzle;
  map.l2 = l2, map.oob = oob;
  for (uint32_t i = 0; i < rank; i++) {
    if (!dims[i] || dims[i] > 1ull << 32) return INVALID_VALUE;
    if (!box[i] || box[i] > 256 || !steps[i] || steps[i] > 8) return INVALID_VALUE;
    if (i && (strides[i - 1] % 16 || strides[i - 1] >> 40)) return INVALID_VALUE;
    map.dims[i] = dims[i], map.box[i] = box[i], map.steps[i] = steps[i];
    if (i) map.strides[i - 1] = strides[i - 1];
  }
  memset(out, 0, 128);
  memcpy(out, &map, sizeof map);
  return SUCCESS;
}

static void say_parameters(void **parameters) {
  say("\"parameters\": [");
  for (int i = 0; i < parameter_count; i++) {
    say(i ? ", \"" : "\"");
    for (int j = 0; j < parameter_bytes[i]; j++) say("%02x", ((unsigned char *)parameters[i])[j]);
    say("\"");
  }
  say("]");
}

CUresult cuLaunchKernelEx(const LaunchConfig *config, void *in, void **parameters, void **extra) {
  const unsigned *grid = config->grid, *block = config->block;
  FAILS();
  if (!depth) return INVALID_CONTEXT;
  if (!grid[0] || !grid[1] || !grid[2] || grid[1] > 65535 || grid[2] > 65535) return INVALID_VALUE;
  if (quiet) return SUCCESS;
  pthread_mutex_lock(&lock);
  say("{\"call\": \"cuLaunchKernelEx\", \"function\": %llu, \"stream\": %llu, \"context\": %llu, ",
      (unsigned long long)in, (unsigned long long)config->stream,
      (unsigned long long)contexts[depth - 1]);
  say("\"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], ", grid[0], grid[1], grid[2], block[0],
      block[1], block[2]);
  say("\"shared_bytes\": %u, \"attributes\": [", config->shared_bytes);
  const LaunchAttribute *attributes = config->attributes;
  for (unsigned i = 0; i < config->attribute_count; i++)
    say("%s[%u, %u, %u, %u]", i ? ", " : "", attributes[i].number, attributes[i].value[0],
        attributes[i].value[1], attributes[i].value[2]);
  say("], ");
  say_parameters(parameters);
  say("}\n");
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

// Graphs. One is the number of its nodes, and is executable as it is; a node is its number.
typedef struct {
  void *function;
  unsigned grid[3], block[3], shared_bytes;
  void **parameters, **extra, *kernel, *context;
} KernelNode;  // CUDA_KERNEL_NODE_PARAMS_v2

static CUresult told(const char *call) {
  pthread_mutex_lock(&lock);
  say("{\"call\": \"%s\", \"capture_mode\": %d}\n", call, capture_mode);
  pthread_mutex_unlock(&lock);
  return depth ? SUCCESS : INVALID_CONTEXT;
}
CUresult cuGraphCreate(void **out, unsigned flags) {
  FAILS();
  return *out = calloc(1, sizeof(int)), told(__func__);
}
CUresult cuGraphAddKernelNode_v2(void **out, void *graph, void **after, size_t count,
                                 const KernelNode *node) {
  FAILS();
  const unsigned *grid = node->grid, *block = node->block;
  int *nodes = graph;
  if (!depth) return INVALID_CONTEXT;
  if (count != (*nodes ? 1 : 0) || (count && *after != (void *)(uintptr_t)*nodes))
    return INVALID_VALUE;  // a row of nodes is all that there is
  pthread_mutex_lock(&lock);
  say("{\"call\": \"cuGraphAddKernelNode\", \"function\": %llu, \"shared_bytes\": %u, ",
      (unsigned long long)node->function, node->shared_bytes);
  say("\"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], ", grid[0], grid[1], grid[2], block[0],
      block[1], block[2]);
  say_parameters(node->parameters);
  say("}\n");
  pthread_mutex_unlock(&lock);
  *out = (void *)(uintptr_t)++*nodes;
  return SUCCESS;
}
CUresult cuGraphKernelNodeSetAttribute(void *node, int number, const unsigned *value) {
  pthread_mutex_lock(&lock);
  say("{\"call\": \"cuGraphKernelNodeSetAttribute\", \"node\": %llu, \"attribute\": %d, "
      "\"value\": [%u, %u, %u]}\n",
      (unsigned long long)node, number, value[0], value[1], value[2]);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(void **out, void *graph, unsigned long long flags) {
  FAILS();
  return *out = graph, told(__func__);
}
CUresult cuGraphDestroy(void *graph) { return told(__func__); }
CUresult cuGraphExecDestroy(void *graph) { return told(__func__); }
CUresult cuStreamIsCapturing(void *stream, int *out) {
  return *out = capturing && stream == capturing, depth ? SUCCESS : INVALID_CONTEXT;
}
CUresult cuGraphLaunch(void *graph, void *stream) {
  FAILS();
  if (!depth) return INVALID_CONTEXT;
  if (capturing && stream == capturing) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  say("{\"call\": \"cuGraphLaunch\", \"stream\": %llu, \"launches\": %d}\n",
      (unsigned long long)stream, *(int *)graph);
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
