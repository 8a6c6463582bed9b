//! Tests of the compiler, with and without the library.

use super::*;

#[test]
fn the_newest_architecture_that_both_know() {
    let known = [75, 80, 86, 90, 100, 120];
    assert_eq!(newest(&known, (9, 0)), Some(90));
    assert_eq!(newest(&known, (8, 9)), Some(86));
    assert_eq!(newest(&known, (13, 1)), Some(120));
    assert_eq!(newest(&known, (6, 1)), None);
}

#[test]
fn an_architecture_of_the_callers_is_kept() {
    assert!(names_architecture("--gpu-architecture=sm_90a"));
    assert!(names_architecture("-arch=compute_90"));
    assert!(!names_architecture("-architecture"));
    assert!(!names_architecture("--use_fast_math"));
}

#[test]
fn errors_carry_the_log() {
    let Error::Compile { log } = compile_error("x", COMPILATION, "k.cu(1): error: no") else {
        panic!()
    };
    assert_eq!(&*log, "k.cu(1): error: no");
    let Error::Compile { log } = compile_error("nvrtcCreateProgram", 3, "") else { panic!() };
    assert_eq!(&*log, "nvrtcCreateProgram failed with code 3");
}

/// The test compiles if NVRTC is installed. Otherwise it checks the error.
#[test]
fn compiles_where_it_is_installed() {
    let compiler = match Compiler::load() {
        Ok(compiler) => compiler,
        Err(Error::Unavailable(why)) => return assert!(why.contains("NVRTC"), "{why}"),
        Err(other) => panic!("{other}"),
    };
    let architecture = compiler.architecture((9, 0)).unwrap();
    let good = "extern \"C\" __global__ void nothing() {}";
    let ptx =
        compiler.compile(good, "nothing.cu", &["--use_fast_math".into()], &architecture).unwrap();
    let ptx = String::from_utf8(ptx).unwrap();
    assert!(ptx.contains(".entry nothing"), "{ptx}");
    let bad =
        compiler.compile("__global__ void f() { undeclared(); }", "bad.cu", &[], &architecture);
    let Err(Error::Compile { log }) = bad else { panic!("{bad:?}") };
    assert!(log.contains("undeclared"), "{log}");
}
