//! Numbers of all types of elements, and what all ranks' numbers become.
//!
//! A reduction has a result here only if every library computes the same bits
//! ([`Number::exact`]).

use crate::dice::Dice;
use crate::prelude::bytes;
use leasehold_collective::{ElementType, Reduce};
use leasehold_conformance::model::Number;

/// Runs an expression with the Rust type of an element as `$rust`.
macro_rules! typed {
    ($element:expr, $rust:ident => $run:expr) => {{
        use half::{bf16, f16};
        use leasehold_collective::ElementType as E;
        macro_rules! arm {
            ($of:ty) => {{
                type $rust = $of;
                $run
            }};
        }
        match $element {
            E::I8 => arm!(i8),
            E::U8 => arm!(u8),
            E::I16 => arm!(i16),
            E::U16 => arm!(u16),
            E::I32 => arm!(i32),
            E::U32 => arm!(u32),
            E::I64 => arm!(i64),
            E::U64 => arm!(u64),
            E::F16 => arm!(f16),
            E::Bf16 => arm!(bf16),
            E::F32 => arm!(f32),
            E::F64 => arm!(f64),
            other => unreachable!("elements of {other}, which no program has"),
        }
    }};
}
pub(super) use typed;

/// The reduction of all ranks' elements, if it is exact for each of them.
pub(super) fn reduce(element: ElementType, how: Reduce, all: &[&[u8]]) -> Option<Vec<u8>> {
    fn of<T: Number>(how: Reduce, all: &[&[u8]]) -> Option<Vec<u8>> {
        let numbers =
            |x: &&[u8]| x.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect();
        let all: Vec<Vec<T>> = all.iter().map(numbers).collect();
        let count = all.first()?.len();
        let mut result = Vec::with_capacity(count);
        for i in 0..count {
            let column: Vec<T> = all.iter().map(|x| x[i]).collect();
            result.push(T::exact(how, &column)?);
        }
        Some(bytemuck::cast_slice(&result).to_vec())
    }
    if how.check(element).is_err() {
        return None;
    }
    #[cfg(test)]
    let how = match how {
        Reduce::Largest if crate::model::effect::is_mistaken() => Reduce::Least,
        _ => how,
    };
    typed!(element, T => of::<T>(how, all))
}

/// Elements of a seed: any integers, and small numbers that are whole and not negative.
pub(super) fn some(element: ElementType, seed: u32, count: usize) -> Vec<u8> {
    if !element.is_float() {
        return bytes(seed, count * element.size() as usize);
    }
    let mut dice = Dice::new(seed.into());
    typed!(element, T => {
        let all = (0..count).map(|_| T::of(f64::from(dice.below(4))));
        all.flat_map(|x| bytemuck::bytes_of(&x).to_vec()).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn a_result_that_depends_on_the_order_is_none() {
        let of = |how, all: [f64; 4]| {
            let all = all.map(|x| f16::from_f64(x).to_le_bytes().to_vec());
            let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
            reduce(ElementType::F16, how, &all).map(|x| f16::from_le_bytes([x[0], x[1]]).to_f64())
        };
        assert_eq!(of(Reduce::Sum, [1.0, 2.0, 3.0, 0.0]), Some(6.0));
        assert_eq!(of(Reduce::Sum, [2048.0, 1.0, 0.0, 0.0]), None, "2049 has 12 digits");
        let none: [&[u8]; 2] = [&[], &[]];
        assert_eq!(reduce(ElementType::I32, Reduce::Average, &none), None);
        let one: [&[u8]; 2] = [&[200], &[100]];
        assert_eq!(reduce(ElementType::U8, Reduce::Sum, &one), Some(vec![44]));
    }
}
