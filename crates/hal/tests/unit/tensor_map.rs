//! Tensor maps: their bytes, their rules beside a driver's, and their operands.

use super::*;
use crate::{Access, Binding};

/// 1,000 rows of 512 numbers of two bytes; boxes of 64 columns and 128 rows.
fn matrix() -> TensorMap {
    TensorMap::new(MapElement::Bf16, &[512, 1000], &[64, 128])
}

#[test]
fn a_tensor_without_gaps_takes_all_of_its_elements() {
    assert_eq!(matrix().bytes(), 512 * 1000 * 2);
    assert_eq!((matrix().rank(), matrix().stride(0), matrix().stride(1)), (2, 2, 1024));
    matrix().swizzle(Swizzle::B128).validate().unwrap();
    // The last row has its own bytes alone.
    let apart = matrix().strides(&[2048]);
    assert_eq!(apart.bytes(), 999 * 2048 + 1024);
    // A stride of zero repeats one row.
    assert_eq!(matrix().strides(&[0]).bytes(), 1024);
    let five = TensorMap::new(MapElement::U8, &[16, 3, 5, 7, 2], &[16, 1, 1, 1, 1]);
    assert_eq!(five.bytes(), 16 * 3 * 5 * 7 * 2);
    five.validate().unwrap();
    // The first dimension of an interleaved tensor counts slices.
    let slices = TensorMap::new(MapElement::Bf16, &[6, 5, 4], &[8, 1, 1]).strides(&[1024, 8192]);
    let slices = |interleave| slices.interleave(interleave).bytes();
    assert_eq!(slices(Interleave::None), 3 * 8192 + 4 * 1024 + 6 * 2);
    assert_eq!(slices(Interleave::B16), 3 * 8192 + 4 * 1024 + 6 * 16);
    assert_eq!(slices(Interleave::B32), 3 * 8192 + 4 * 1024 + 6 * 32);
}

#[test]
fn each_rule_is_named() {
    let rule = |map: TensorMap, says: &str| {
        let error = map.validate().unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    };
    rule(TensorMap::zeroed(), "tensorRank");
    rule(TensorMap::new(MapElement::F32, &[4; 6], &[4; 6]), "tensorRank");
    rule(TensorMap::new(MapElement::F32, &[4, 4], &[4]), "tensorRank");
    rule(matrix().strides(&[]), "tensorRank");
    rule(matrix().steps(&[1]), "tensorRank");
    rule(matrix().interleave(Interleave::B16), "3 dimensions");
    rule(TensorMap::new(MapElement::F32, &[0], &[4]), "globalDim");
    rule(TensorMap::new(MapElement::F32, &[(1 << 31) + 1], &[4]), "globalDim");
    rule(matrix().strides(&[1032]), "globalStrides");
    rule(matrix().strides(&[1 << 40]), "globalStrides");
    rule(TensorMap::new(MapElement::F32, &[512], &[257]), "box 0 is 1 to 256");
    rule(TensorMap::new(MapElement::F32, &[512, 4], &[4, 0]), "box 1 is 1 to 256");
    rule(matrix().steps(&[1, 9]), "elementStrides");
    rule(matrix().steps(&[0, 1]), "elementStrides");
    rule(TensorMap::new(MapElement::F32, &[512], &[3]), "no multiple of 16");
    rule(TensorMap::new(MapElement::F32, &[512, 512], &[256, 256]), "shared memory");
    rule(TensorMap::new(MapElement::Bf16, &[512], &[128]).swizzle(Swizzle::B128), "takes 128");
    rule(TensorMap::new(MapElement::Bf16, &[512], &[64]).swizzle(Swizzle::B64), "takes 64");
    rule(matrix().l2_promotion(32), "one of their names");
    rule(TensorMap::new(MapElement::U8, &[512], &[16]).fill_nan(), "oobFill");
    let mut odd = matrix();
    odd.element = 13;
    rule(odd, "tensorDataType");
    let mut odd = matrix();
    odd.reserved[9] = 1;
    rule(odd, "reserved bytes are 0");
}

#[test]
fn the_rules_are_those_of_a_driver() {
    let (mut beyond, mut long) = (0, 0);
    for line in include_str!("tensor_maps.txt").lines().skip(1) {
        let words: Vec<&str> = line.split(' ').collect();
        let numbers = |i: usize| -> Vec<u64> {
            words[i].split(',').filter(|w| *w != "-").map(|w| w.parse().unwrap()).collect()
        };
        let number = |i: usize| numbers(i)[0];
        let narrow = |i: usize| -> Vec<u32> { numbers(i).iter().map(|&n| n as u32).collect() };
        let mut map = TensorMap::new(MapElement::U8, &numbers(2), &narrow(4))
            .strides(&numbers(3))
            .steps(&narrow(5));
        map.element = number(0) as u8;
        [map.interleave, map.swizzle, map.l2, map.nan] = [6, 7, 8, 9].map(|i| number(i) as u8);
        let addr = (1 << 20) + number(1);
        let binding = Binding { addr, len: u64::MAX, native: 0, access: Access::Read };
        let launch = LaunchInfo::new(([1; 3], [1; 3], 0), &[], std::slice::from_ref(&binding));
        match (map.validate_for(&launch, 0), number(10)) {
            (Ok(()), 0) | (Err(_), 1) => {}
            (Err(error), 0) if error.to_string().contains("shared memory") => beyond += 1,
            (Err(error), 0) if error.to_string().contains("copies no box") => long += 1,
            (ours, code) => panic!("{line}: {ours:?}, and the driver's code is {code}"),
        }
    }
    assert_eq!(beyond, 22, "boxes that fit into no shared memory");
    assert_eq!(long, 5, "sizes of which a device copies no box");
}

#[test]
fn a_map_lies_in_its_operand() {
    let check = |addr: u64, len: u64| {
        let binding = Binding { addr, len, native: 0, access: Access::Read };
        matrix().validate_for(&LaunchInfo::new(([1; 3], [1; 3], 0), &[], &[binding]), 0)
    };
    check(1 << 20, 1_024_000).unwrap();
    let error = check(1 << 20, 1_023_999).unwrap_err().to_string();
    assert!(error.contains("takes 1024000 bytes, and binding 0 has 1023999"), "{error}");
    let error = check((1 << 20) + 8, 1_024_000).unwrap_err().to_string();
    assert!(error.contains("aligned to 16 bytes (globalAddress)"), "{error}");
}

#[test]
fn any_bytes_are_a_map_that_is_checked() {
    for seed in 0..=u8::MAX {
        let bytes: Vec<u8> =
            (0..128).map(|i: u8| i.wrapping_mul(seed).wrapping_add(seed)).collect();
        let map = TensorMap::from_params(&bytes, 0);
        let _ = (map.validate(), map.bytes(), format!("{map:?}"));
    }
}
