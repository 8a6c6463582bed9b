//! Tests that the Metal sources and the Rust declarations agree.

use super::super::cpu;
use super::*;

/// The operands are buffers 0, 1, … with the access that the CPU kernel declares, then come the
/// parameters.
#[test]
fn every_cpu_kernel_has_a_function_with_its_signature() {
    assert_eq!(KERNELS.len(), cpu::KERNELS.len());
    for spec in cpu::KERNELS {
        let mps = MpsSpec::find(spec.name).unwrap_or_else(|| panic!("{} is missing", spec.name));
        let open = format!("kernel void {}(", spec.name);
        let (_, rest) =
            mps.module.source.split_once(&open).unwrap_or_else(|| panic!("no {}", spec.name));
        let (signature, _) = rest.split_once(") {").expect("the end of a signature");
        let bound: Vec<&str> = signature.split(',').filter(|p| p.contains("[[buffer(")).collect();
        assert_eq!(bound.len(), spec.operands.len() + 1, "{}", spec.name);
        for (i, parameter) in bound.iter().enumerate() {
            assert!(parameter.ends_with(&format!("[[buffer({i})]]")), "{}: {parameter}", spec.name);
            let start = match spec.operands.get(i) {
                None => "constant ",
                Some(operand) if operand.access == leasehold::Access::Read => "device const u8* ",
                Some(_) => "device u8* ",
            };
            assert!(parameter.trim().starts_with(start), "{}: {parameter}", spec.name);
        }
    }
}

/// C++ for the host has both, and Metal 3.1 has neither.
#[test]
fn no_kernel_has_doubles_or_lambdas() {
    for module in MODULES {
        assert!(!module.source.contains("double"), "{}", module.name);
        assert!(
            !module.source.contains("[&]") && !module.source.contains("[=]"),
            "{}",
            module.name
        );
    }
}
