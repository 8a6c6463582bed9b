//! Refusals before a launch.

use leasehold_operators::kernels::cpu::KERNELS;
use leasehold_operators::kernels::cpu::attention::AttentionParams;
use leasehold_operators::kernels::cpu::cache::CacheLayout;
use leasehold_operators::kernels::cpu::isa::Isa;
use leasehold_operators::kernels::cpu::linear::{FEW, LinearParams, NORM};
use leasehold_operators::kernels::cpu::sampling::{NextTokenParams, RowParams};
use leasehold_operators::kernels::cpu::tile::{KernelSpec, NONE, Params, bind};

fn refusal(name: &str, params: &impl Params) -> String {
    KernelSpec::find(name).unwrap().plan(params.as_bytes()).unwrap_err().to_string()
}

#[test]
fn every_kernel_has_its_name_once_and_a_variant_for_every_level_of_the_machine() {
    for (i, spec) in KERNELS.iter().enumerate() {
        assert!(KERNELS[..i].iter().all(|other| other.name != spec.name));
        for isa in Isa::ALL.into_iter().filter(|isa| isa.available()) {
            assert_eq!(spec.resolve(Some(isa)).unwrap().0, isa, "{}", spec.name);
        }
        assert_eq!(spec.resolve(None).unwrap().0, Isa::best());
    }
}

#[test]
fn parameters_of_the_wrong_size_are_refused() {
    for spec in KERNELS {
        let refusal = spec.plan(&vec![1; spec.params_bytes + 4]).unwrap_err();
        assert!(
            refusal.contains(spec.name) && refusal.contains("bytes of parameters"),
            "{refusal}"
        );
        assert!(spec.plan(&[]).is_err());
    }
}

/// Zero bits are invalid for every kernel, except the one that accepts a count of zero.
#[test]
fn parameters_of_zeros_are_refused() {
    for spec in KERNELS.iter().filter(|spec| spec.name != "fill") {
        assert!(spec.plan(&vec![0; spec.params_bytes]).is_err(), "{}", spec.name);
    }
}

#[test]
fn parameters_that_describe_nothing_are_refused() {
    let linear =
        LinearParams { m: 1, k: 4, n: [4, 0, 0], ldx: 4, ldy: [4, 0, 0], ..Default::default() };
    assert!(KernelSpec::find("linear").unwrap().plan(linear.as_bytes()).is_ok());
    assert!(refusal("linear", &LinearParams { x: 3, ..linear }).contains("element type"));
    assert!(refusal("linear", &LinearParams { flags: 8, ..linear }).contains("flags"));
    assert!(refusal("linear", &LinearParams { ldx: 3, ..linear }).contains("overlap"));
    assert!(refusal("linear", &LinearParams { n: [4, 4, 0], ..linear }).contains("n[1]"));
    assert!(
        refusal("linear", &LinearParams { m: FEW as u32 + 1, flags: NORM, ..linear })
            .contains("normalised")
    );
    assert!(refusal("linear3", &linear).contains("zero"));
    let attention = AttentionParams {
        m: 1,
        heads: 6,
        kv_heads: 4,
        head_dim: 8,
        positions: 4,
        ldq: 48,
        ldo: 48,
        rotary: 8,
        layout: CacheLayout::contiguous(4, 4),
        ..Default::default()
    };
    assert!(refusal("attention", &attention).contains("evenly"));
    assert!(
        refusal("attention", &AttentionParams { kv_heads: 3, head_dim: 512, ..attention })
            .contains("wider")
    );
    assert!(
        refusal("decode_attention", &AttentionParams { kv_heads: 3, rotary: 7, ..attention })
            .contains("rotated")
    );
    let wide = AttentionParams { heads: 17, kv_heads: 1, ldq: 136, ldo: 136, ..attention };
    assert!(refusal("decode_attention", &wide).contains("groups of 16"));
    let none = AttentionParams { kv_heads: 3, m: 0, ..attention };
    assert!(refusal("decode_attention", &none).contains("the number of rows"));
    let next = NextTokenParams { rows: 2, n: 4, ld: 4, ring: 1, log_ring: 1 };
    assert!(KernelSpec::find("next_token").unwrap().plan(next.as_bytes()).is_ok());
    assert!(refusal("next_token", &NextTokenParams { ld: 3, ..next }).contains("overlap"));
    assert!(refusal("next_token", &NextTokenParams { n: 0, ..next }).contains("logits"));
    assert!(refusal("next_token", &NextTokenParams { rows: 0, ..next }).contains("rows"));
}

#[test]
fn operands_too_short_misaligned_or_missing_are_refused() {
    let spec = KernelSpec::find("argmax").unwrap();
    let p = RowParams { rows: 2, n: 5, ldx: 7, ..Default::default() };
    let launch = spec.plan(p.as_bytes()).unwrap();
    assert_eq!((launch.grid, launch.bytes[0], launch.bytes[1]), ([2, 1, 1], 12 * 4, 8));
    let (mut x, mut ids) = ([0f32; 13], [0i32; 2]);
    let ids = bind(&mut ids);
    assert!(spec.check(&launch, &[bind(&mut x[..12]), ids]).is_ok());
    assert!(
        spec.check(&launch, &[bind(&mut x[..11]), ids])
            .unwrap_err()
            .contains("operand x of kernel argmax")
    );
    assert!(
        spec.check(&launch, &[bind(&mut x)]).unwrap_err().contains("takes 2 operands, 1 are bound")
    );
    assert!(spec.check(&launch, &[NONE, ids]).is_err());
    let mut skewed = bind(&mut x);
    skewed.addr += 2;
    skewed.len -= 2;
    assert!(spec.check(&launch, &[skewed, ids]).unwrap_err().contains("aligned to 4"));
}

/// Sizes whose products exceed 32 bits are computed in 64.
#[test]
fn large_operands_are_counted_in_64_bits() {
    let n = 1 << 20;
    let p = LinearParams {
        m: 1,
        k: n,
        n: [n, 0, 0],
        ldx: n,
        ldy: [n, 0, 0],
        w: 1,
        ..Default::default()
    };
    let launch = KernelSpec::find("linear").unwrap().plan(p.as_bytes()).unwrap();
    assert_eq!(launch.bytes[2], 1 << 41);
}
