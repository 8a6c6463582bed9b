//! CUDA kernels without a device: their sources, compiled as C++ and run by
//! `tests/emulator/emulator.hpp`.
//!
//! Each process builds the library once, into the target folder. Without `g++` no emulation runs;
//! with `LEASEHOLD_REQUIRE_TOOLS` this is a failure. `LEASEHOLD_NO_EMULATION` disables it, because
//! the emulator switches stacks, which AddressSanitizer does not support.

use leasehold::backend::sync::{Mutex, OnceLock};
use leasehold_hal::kernel::Binding;
use leasehold_operators::kernels::cpu::tile::{KernelSpec, Params};
use leasehold_operators::kernels::cuda::{COMMON, CudaSpec, KERNELS, MODULES, TENSOR_KERNELS};
use std::ffi::{CString, c_char, c_int};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

type Emulate =
    unsafe extern "C" fn(*const c_char, *const u8, usize, *const u32, *const u32, c_int) -> c_int;

/// One launch at a time, because the emulator has one block.
struct Emulator(Mutex<Emulate>);

/// All sources as one translation unit: a namespace for each file, and a table of the entries.
fn program() -> String {
    let mut text = format!("#include \"emulator.hpp\"\n#line 1 \"common.cuh\"\n{COMMON}\n");
    for module in MODULES {
        let space = module.name.trim_end_matches(".cu");
        let _ = write!(
            text,
            "namespace {space}_cu {{\n#line 1 \"{}\"\n{}\n}}\n",
            module.name, module.source
        );
    }
    text.push_str(
        "extern \"C\" __attribute__((visibility(\"default\"))) int emulate(const char* name, const unsigned char* arguments, size_t size, const unsigned* grid,\n\
         \x20                      const unsigned* block, int reverse) {\n",
    );
    for spec in KERNELS.iter().chain(TENSOR_KERNELS) {
        let space = spec.module.name.trim_end_matches(".cu");
        let _ = writeln!(
            text,
            "    if (!strcmp(name, \"{0}\")) return emulator::launch({space}_cu::{0}, arguments, size, grid, block, reverse), 0;",
            spec.entry
        );
    }
    text.push_str("    return 1;\n}\n");
    text
}

/// `Ok(None)` without a compiler.
fn build() -> Result<Option<PathBuf>, String> {
    if std::env::var_os("LEASEHOLD_NO_EMULATION").is_some() {
        eprintln!("skipped: no emulation of the CUDA kernels, as asked");
        return Ok(None);
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    std::fs::create_dir_all(&folder).expect("a folder for the emulated kernels");
    // A separate file for each process, because another process may have the library open.
    let at = |ending: &str| folder.join(format!("kernels-{}.{ending}", std::process::id()));
    std::fs::write(at("cpp"), program()).expect("the sources are written");
    let compiled = Command::new("g++")
        .args([
            "-std=c++17",
            "-O1",
            "-g",
            "-shared",
            "-fPIC",
            "-fvisibility=hidden",
            "-ffp-contract=off",
            "-fno-strict-aliasing",
            "-w",
        ])
        // Detects misaligned vectors, overflowing shifts, and indices outside arrays.
        .args(["-fsanitize=alignment,shift,bounds", "-fno-sanitize-recover=all"])
        .arg("-I")
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emulator"))
        .arg(at("cpp"))
        .arg("-o")
        .arg(at("so"))
        .output();
    match compiled {
        Ok(output) => {
            if !output.status.success() {
                return Err(format!("g++: {}", String::from_utf8_lossy(&output.stderr)));
            }
            Ok(Some(at("so")))
        }
        Err(e) => {
            if std::env::var_os("LEASEHOLD_REQUIRE_TOOLS").is_some() {
                return Err(format!("g++ is required: {e}"));
            }
            eprintln!("skipped: no emulation of the CUDA kernels, g++: {e}");
            Ok(None)
        }
    }
}

fn load() -> Result<Option<Emulator>, String> {
    let Some(path) = build()? else { return Ok(None) };
    let name = CString::new(path.to_string_lossy().into_owned()).map_err(|e| e.to_string())?;
    // SAFETY: the library was just built from the sources above. Its initialisers access only its
    // own memory.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        return Err("the emulated kernels do not load".to_owned());
    }
    // SAFETY: the library stays loaded.
    let entry = unsafe { libc::dlsym(library, c"emulate".as_ptr()) };
    for ending in ["cpp", "so"] {
        let _ = std::fs::remove_file(path.with_extension(ending));
    }
    if entry.is_null() {
        return Err("the emulated kernels have no entry".to_owned());
    }
    // SAFETY: the symbol is the function that the program defines, with this signature.
    Ok(Some(Emulator(Mutex::new(unsafe {
        std::mem::transmute::<*mut libc::c_void, Emulate>(entry)
    }))))
}

fn emulator() -> Option<&'static Emulator> {
    static EMULATOR: OnceLock<Result<Option<Emulator>, String>> = OnceLock::new();
    match EMULATOR.get_or_init(load) {
        Ok(emulator) => emulator.as_ref(),
        Err(why) => panic!("{why}"),
    }
}

/// Returns whether an emulation is available.
pub fn available() -> bool {
    emulator().is_some()
}

/// Launches a kernel as the CUDA backend does: the operands' addresses, then the parameters, in one
/// buffer. With `reverse`, blocks and threads run from the last to the first.
pub fn run(name: &str, params: &impl Params, bindings: &[Binding], reverse: bool) {
    assert!(
        run_words(name, params.as_bytes(), bindings, reverse),
        "parameters beyond what CUDA launches"
    );
}

/// Like [`run`], with parameters in the form of a launch. Returns whether the launch has a
/// geometry. A kernel for tensor cores goes before the kernel for all devices.
pub fn run_words(name: &str, params: &[u8], bindings: &[Binding], reverse: bool) -> bool {
    let spec = KernelSpec::find(name).expect("a kernel of that name");
    let launch = spec.plan(params).expect("parameters that the kernel takes");
    spec.check(&launch, bindings).expect("operands that the kernel takes");
    let tensor = TENSOR_KERNELS.iter().find(|cuda| cuda.name == name && cuda.takes(params));
    let cuda = tensor.or_else(|| CudaSpec::find(name)).expect("a CUDA kernel");
    let Ok(geometry) = cuda.geometry(params) else {
        return false;
    };
    let mut arguments: Vec<u8> = bindings.iter().flat_map(|b| b.addr.to_le_bytes()).collect();
    arguments.extend(params);
    let name = CString::new(cuda.entry).expect("a name without zeros");
    let entry = emulator().expect("an emulation").0.lock();
    // SAFETY: the bindings are checked against the requirements of the launch, as for every other
    // level's tiles. The emulator runs one launch at a time, under the lock.
    let status = unsafe {
        entry(
            name.as_ptr(),
            arguments.as_ptr(),
            arguments.len(),
            geometry.grid.as_ptr(),
            geometry.block.as_ptr(),
            c_int::from(reverse),
        )
    };
    assert_eq!(status, 0, "the emulator does not know the kernel");
    true
}
