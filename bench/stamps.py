"""Compiles the operator library's CUDA sources to a folder of machine code for one architecture, for the example `stamps` of
`leasehold-llama`. Needs no GPU and no driver.

    target/nvrtc/bin/python bench/stamps.py plain|stamped FOLDER [MODULE ...]

`plain` compiles them as they are. `stamped` adds stamps: the first thread of each block writes the device's time at its begin, after
`wait_for_previous` and at its end. The sources know nothing of that. `ci/ptx.sh` makes the interpreter. With modules (`linear`) it writes
those alone, to compare one method with another; the example has the others' committed images.
"""

import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "ci"))
import ptx  # noqa: E402

ARCHITECTURE = "sm_90"
# The program puts the log's address here, in the compiled image.
PLACE = 0x5F6C6F675F706D73
STAMPS = f"""
extern "C" {{ __device__ u64 leasehold_stamps = {PLACE:#x}ull; }}

// The log: the number of stamps, their limit, and two words of each.
static __device__ __forceinline__ void stamp(u32 what, u32 kernel) {{
    if (threadIdx.x != 0 || threadIdx.y != 0) return;
    u64 now;
    u32 processor, warp;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
    asm volatile("mov.u32 %0, %%smid;" : "=r"(processor));
    asm volatile("mov.u32 %0, %%warpid;" : "=r"(warp));
    unsigned long long* const log = *(unsigned long long* volatile*)&leasehold_stamps;
    const u64 at = atomicAdd(log, 1ull);
    const u64 block = (u64)blockIdx.y * gridDim.x + blockIdx.x;
    if (at >= log[1]) return;
    log[2 + 2 * at] = now;
    log[3 + 2 * at] = what | kernel << 8 | processor << 16 | (u64)(warp & 255) << 24 | block << 32;
}}

struct Stamps {{
    u32 kernel;
    __device__ Stamps(u32 kernel) : kernel(kernel) {{ stamp(0, kernel); }}
    __device__ ~Stamps() {{ stamp(2, kernel); }}
}};
"""
FIRST_FUNCTION = "INLINE void let_next_start() {"
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
KERNEL = re.compile(r"^(?:DENSE_|CLUSTER_)?KERNEL\([^)]*\)\s+(\w+)\([^)]*\)\s*\{", re.MULTILINE)


def stamped(source, kernels):
    """The source with stamps. Adds its kernels to `kernels`, whose places are the numbers in the log."""
    assert source.count(FIRST_FUNCTION) == 1 and source.count(WAIT) == 1, "common.cuh has changed"
    source = source.replace(FIRST_FUNCTION, STAMPS + FIRST_FUNCTION).replace(WAIT, WAIT + "\n    stamp(1, 0);")

    def mark(found):
        kernels.append(found[1])
        return f"{found[0]} const Stamps stamps({len(kernels) - 1});"

    return KERNEL.sub(mark, source)


def main():
    how, folder, modules = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3:]
    folder.mkdir(parents=True, exist_ok=True)
    compiler, kernels = ptx.Compiler(), []
    for path in sorted(ptx.WITH_MACHINE_CODE.glob("*.cu")):
        source = ptx.source_of(path)
        if how == "stamped":
            source = stamped(source, kernels)
        if not modules or path.stem in modules:
            image = compiler.compile(path.name, source, ptx.ALONE.get(path.name, ARCHITECTURE))
            (folder / f"{path.stem}.cubin").write_bytes(image)
    (folder / "kernels.txt").write_text("".join(f"{name}\n" for name in kernels))
    print(f"{folder}: {how} images for {ARCHITECTURE}, {len(kernels)} kernels with stamps")


if __name__ == "__main__":
    main()
