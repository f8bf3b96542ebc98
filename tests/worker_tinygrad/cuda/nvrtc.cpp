/* A stand-in for NVRTC: CUDA C becomes a shared object for this processor, which `driver.cpp` takes for a module.
 *
 * What a source may use is in `include`; anything else is a compilation error with clang's own log, as NVRTC has it.
 * Environment: STAND_IN_CUDA (the folder of this file), STAND_IN_CUDA_FILES (a folder in which what is built is kept, and
 * built once), STAND_IN_CUDA_COMPILER (a clang). */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <unistd.h>

enum { SUCCESS = 0, COMPILATION = 6 };
struct Program {
  std::string source, image, log;
};

static std::string read(const std::string &path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream all;
  all << in.rdbuf();
  return all.str();
}

static std::string files() { return getenv("STAND_IN_CUDA_FILES"); }

static std::string kernel_name(const std::string &source) {
  const size_t bounds = source.find("__launch_bounds__");
  const size_t open = bounds == std::string::npos ? bounds : source.find(") ", bounds);
  if (open == std::string::npos) return "";
  return source.substr(open + 2, source.find('(', open + 2) - open - 2);
}

extern "C" {
const char *nvrtcGetErrorString(int code) { return code == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_SUCCESS"; }
int nvrtcVersion(int *major, int *minor) { return *major = 12, *minor = 4, SUCCESS; }
int nvrtcCreateProgram(Program **program, const char *source, const char *, int, const char *const *, const char *const *) {
  *program = new Program{source, "", ""};
  return SUCCESS;
}
int nvrtcDestroyProgram(Program **program) { return delete *program, *program = nullptr, SUCCESS; }

/* By the compiler and the linker themselves: clang's way to a shared object of C++ takes twice as long. */
static int build(Program *program, const std::string &text, const std::string &kept) {
  std::string folder = files() + "/kernel-XXXXXX";
  if (!mkdtemp(&folder[0])) return COMPILATION;
  const std::string at = folder + "/kernel", headers = getenv("STAND_IN_CUDA");
  const std::string compiler = getenv("STAND_IN_CUDA_COMPILER");
  std::ofstream(at + ".cpp") << text;
  const std::string command = "{ " + compiler + " --driver-mode=g++ -std=c++17 -O1 -march=native -w -fPIC -c -I" + headers +
                              "/include " + at + ".cpp -o " + at + ".o && ld -shared " + at + ".o -lm -o " + at + ".so; } > " + at + ".log 2>&1";
  const int failed = system(command.c_str());
  program->log = read(at + ".log");
  if (!failed) rename((at + ".so").c_str(), kept.c_str());
  for (const char *end : {".cpp", ".o", ".so", ".log"}) unlink((at + end).c_str());
  rmdir(folder.c_str());
  return failed ? COMPILATION : SUCCESS;
}
int nvrtcCompileProgram(Program *program, int, const char *const *) {
  const std::string name = kernel_name(program->source);
  const char *barriers = program->source.find("__syncthreads") == std::string::npos ? "false" : "true";
  const std::string text = "#include <device.h>\n" + program->source + "\nextern \"C\" void entry__" + name +
                           "(const char *arguments, const unsigned *dims) { launch(" + name + ", arguments, dims, " + barriers +
                           "); }\n";
  const std::string kept = files() + "/" + std::to_string(std::hash<std::string>()(text)) + ".so";
  const int failed = access(kept.c_str(), R_OK) ? build(program, text, kept) : SUCCESS;
  program->image = failed ? "" : read(kept);
  return failed;
}
int nvrtcGetPTXSize(Program *program, size_t *size) { return *size = program->image.size(), SUCCESS; }
int nvrtcGetPTX(Program *program, char *to) { return memcpy(to, program->image.data(), program->image.size()), SUCCESS; }
int nvrtcGetProgramLogSize(Program *program, size_t *size) { return *size = program->log.size() + 1, SUCCESS; }
int nvrtcGetProgramLog(Program *program, char *to) { return strcpy(to, program->log.c_str()), SUCCESS; }
}
