//! Mistakes in Metal sources that the emulator shows.

use leasehold_emulator::{Emulator, Launch, Operand, Program, Source};

const HEAD: &str = "#include <metal_stdlib>\nusing namespace metal;\n";

/// Compiles a library. `None` without the compiler.
fn compile(body: &str) -> Result<Option<Emulator>, String> {
    let text = format!("{HEAD}{body}");
    match Program::metal(&[Source { name: "planted.metal", text: &text }]) {
        Ok(program) => Ok(Some(Emulator::new(program))),
        Err(why) if why.is_skip() => {
            eprintln!("skipped: {why}");
            Ok(None)
        }
        Err(why) => Err(why.to_string()),
    }
}

/// 64 threads turn 64 floats around by way of threadgroup memory, in both orders.
fn turned(barrier: &str) -> Option<[[f32; 64]; 2]> {
    let body = format!(
        "kernel void turn(device float* x [[buffer(0)]], uint i [[thread_index_in_threadgroup]]) {{
    threadgroup float all[64];
    all[i] = x[i];
    {barrier}
    x[i] = all[63 - i];
}}\n"
    );
    let emulator = compile(&body).expect("a source that compiles")?;
    Some([false, true].map(|reverse| {
        let mut x: [f32; 64] = std::array::from_fn(|i| i as f32);
        let at = x.as_mut_ptr().expose_provenance() as u64;
        let operand = Operand { at, device: at, bytes: 256, reads: true, writes: true };
        let launch = Launch {
            kernel: "turn",
            operands: &[operand],
            params: &[],
            grid: [1; 3],
            block: [64, 1, 1],
            shared: 0,
            cluster: [1; 3],
            cooperative: false,
            reverse,
        };
        // SAFETY: the kernel's 64 threads access the 64 elements.
        unsafe { emulator.run(&launch) }.expect("a launch");
        x
    }))
}

#[test]
fn a_missing_barrier_shows() {
    let wanted: [f32; 64] = std::array::from_fn(|i| 63.0 - i as f32);
    let Some(right) = turned("threadgroup_barrier(mem_flags::mem_threadgroup);") else { return };
    assert_eq!(right, [wanted, wanted]);
    let wrong = turned("").expect("the compiler is there");
    // Threadgroup memory that no thread has written yet is NaN.
    assert!(wrong.iter().all(|x| x.iter().any(|v| v.is_nan())), "{wrong:?}");
}

#[test]
fn a_pointer_to_another_address_space_is_no_argument() {
    let body = |space: &str| {
        format!(
            "inline float first({space} const float* x) {{ return x[0]; }}
kernel void f(device float* x [[buffer(0)]]) {{ x[1] = first(x); }}\n"
        )
    };
    if compile(&body("device")).expect("the right address space").is_none() {
        return;
    }
    for wrong in ["threadgroup", "constant", "thread"] {
        let why = compile(&body(wrong)).expect_err("another address space");
        assert!(why.contains("no matching function"), "{wrong}: {why}");
    }
}

#[test]
fn half_and_bfloat_have_no_arithmetic() {
    let body = "kernel void f(device ushort* x [[buffer(0)]]) {
    x[0] = as_type<ushort>(as_type<half>(x[0]) + as_type<half>(x[1]));
}\n";
    match compile(body) {
        Ok(None) => {}
        Ok(Some(_)) => panic!("the sum of two halves compiled"),
        Err(why) => assert!(why.contains("invalid operands"), "{why}"),
    }
}
