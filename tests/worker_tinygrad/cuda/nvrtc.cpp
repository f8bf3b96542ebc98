/* A stand-in for NVRTC: CUDA C becomes a shared object for this processor, which `driver.cpp` takes for a module.
 *
 * What a source may use is in `include`; anything else is a compilation error with clang's own log, as NVRTC has it. */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
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

int nvrtcCompileProgram(Program *program, int, const char *const *) {
  char folder[] = "/tmp/kernel-XXXXXX";
  if (!mkdtemp(folder)) return COMPILATION;
  const std::string at = folder, name = kernel_name(program->source), home = getenv("STAND_IN_CUDA");
  const char *barriers = program->source.find("__syncthreads") == std::string::npos ? "false" : "true";
  std::ofstream(at + "/kernel.cpp") << "#include <device.h>\n" << program->source << "\nextern \"C\" void entry__" << name
                                    << "(const char *arguments, const unsigned *dims) { launch(" << name
                                    << ", arguments, dims, " << barriers << "); }\n";
  const bool headers = !getenv("STAND_IN_CUDA_NO_HEADERS");
  const std::string device = headers ? "-I" + home + "/include" : "-include " + home + "/include/device.h -I" + home + "/none";
  if (!headers) { /* as where the library came alone: its own words are there, files to include are not */
    std::string text = read(at + "/kernel.cpp");
    std::ofstream(at + "/kernel.cpp") << text.substr(text.find('\n') + 1);
  }
  const std::string command = "${STAND_IN_CUDA_CLANG:-clang++} -std=c++17 -O1 -march=native -w -fPIC -shared " + device + " " + at +
                              "/kernel.cpp -o " + at + "/kernel.so > " + at + "/log 2>&1";
  const int failed = system(command.c_str());
  program->log = read(at + "/log");
  program->image = failed ? "" : read(at + "/kernel.so");
  for (const char *file : {"/kernel.cpp", "/kernel.so", "/log"}) unlink((at + file).c_str());
  rmdir(folder);
  return failed ? COMPILATION : SUCCESS;
}
int nvrtcGetPTXSize(Program *program, size_t *size) { return *size = program->image.size(), SUCCESS; }
int nvrtcGetPTX(Program *program, char *to) { return memcpy(to, program->image.data(), program->image.size()), SUCCESS; }
int nvrtcGetProgramLogSize(Program *program, size_t *size) { return *size = program->log.size() + 1, SUCCESS; }
int nvrtcGetProgramLog(Program *program, char *to) { return strcpy(to, program->log.c_str()), SUCCESS; }
}
