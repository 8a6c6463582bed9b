//! Numbers of all types of elements, and what all ranks' numbers become.
//!
//! A reduction has a result here only if every library computes the same bits: whatever the order,
//! no sum or product on the way is rounded.

use crate::dice::Dice;
use crate::prelude::bytes;
use half::{bf16, f16};
use leasehold_collective::{Element, ElementType, Reduce};

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

/// A type whose reductions are known.
pub(super) trait Number: Element {
    /// The reduction of all ranks' elements, if it is exact.
    fn reduce(how: Reduce, all: &[Self]) -> Option<Self>;

    /// Elements of a seed.
    fn some(seed: u32, count: usize) -> Vec<u8>;
}

macro_rules! integers {
    ($($rust:ty)*) => {$(
        impl Number for $rust {
            fn reduce(how: Reduce, all: &[Self]) -> Option<Self> {
                all.iter().copied().reduce(|a, b| match how {
                    Reduce::Sum => a.wrapping_add(b),
                    Reduce::Product => a.wrapping_mul(b),
                    Reduce::Least => a.min(b),
                    Reduce::Largest | Reduce::Average => a.max(b),
                }).filter(|_| how != Reduce::Average)
            }

            fn some(seed: u32, count: usize) -> Vec<u8> {
                bytes(seed, count * size_of::<Self>())
            }
        }
    )*};
}
integers!(i8 u8 i16 u16 i32 u32 i64 u64);

macro_rules! floats {
    ($($rust:ty = $digits:literal, $of:expr, $to:expr;)*) => {$(
        impl Number for $rust {
            fn reduce(how: Reduce, all: &[Self]) -> Option<Self> {
                let all: Vec<f64> = all.iter().copied().map($to).collect();
                let exact = |x: f64| ($to($of(x)) == x).then_some(x);
                reduced(how, &all, $digits, exact).map($of)
            }

            fn some(seed: u32, count: usize) -> Vec<u8> {
                let mut dice = Dice::new(seed.into());
                let all = (0..count).map(|_| $of(f64::from(dice.below(4))));
                all.flat_map(|x: Self| bytemuck::bytes_of(&x).to_vec()).collect()
            }
        }
    )*};
}
floats! {
    f16 = 11, f16::from_f64, f16::to_f64;
    bf16 = 8, bf16::from_f64, bf16::to_f64;
    f32 = 24, |x: f64| x as f32, f64::from;
    f64 = 53, |x: f64| x, |x: f64| x;
}

/// A number that is not negative, as an odd number and a power of two; 1 for zero.
fn parts(x: f64) -> (u64, i32) {
    if x == 0.0 {
        return (1, 0);
    }
    let bits = x.abs().to_bits();
    let mantissa = bits & ((1 << 52) - 1) | 1 << 52;
    let zeros = mantissa.trailing_zeros();
    (mantissa >> zeros, (bits >> 52) as i32 - 1075 + zeros as i32)
}

/// The largest power of two by which a program's numbers differ from 1. The types hold more.
const RANGE: i32 = 12;

/// The reduction of numbers of so many binary digits. `exact` gives those that the type holds.
fn reduced(
    how: Reduce,
    all: &[f64],
    digits: u32,
    exact: impl Fn(f64) -> Option<f64>,
) -> Option<f64> {
    let most = 1u128 << digits;
    match how {
        Reduce::Sum | Reduce::Average => {
            let unit = all.iter().filter(|x| **x != 0.0).map(|x| parts(*x).1).min().unwrap_or(0);
            let units = |x: &f64| match parts(*x) {
                _ if *x == 0.0 => Some(0),
                (odd, power) if power - unit < 64 => Some(u128::from(odd) << (power - unit)),
                _ => None,
            };
            let total: u128 = all.iter().map(units).sum::<Option<u128>>()?;
            let (sum, size) = (all.iter().sum(), all.len() as f64);
            if total > most {
                return None;
            }
            if how == Reduce::Sum {
                return exact(sum);
            }
            // A library may divide before it adds.
            all.iter().try_for_each(|x| exact(x / size).map(drop))?;
            all.len().is_power_of_two().then(|| exact(sum / size)).flatten()
        }
        Reduce::Product => {
            let odd = all.iter().try_fold(1u128, |product, x| {
                let product = product * u128::from(parts(*x).0);
                (product <= most).then_some(product)
            });
            let far: i32 = all
                .iter()
                .map(|x| if *x == 0.0 { 0 } else { x.abs().log2().abs().ceil() as i32 })
                .sum();
            odd.filter(|_| far <= RANGE)?;
            exact(all.iter().product())
        }
        Reduce::Least => all.iter().copied().reduce(f64::min),
        Reduce::Largest => all.iter().copied().reduce(f64::max),
    }
}

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
            result.push(T::reduce(how, &column)?);
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
    typed!(element, T => <T as Number>::some(seed, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_that_depends_on_the_order_is_none() {
        let f16s = |all: [f64; 4]| all.map(|x| f16::from_f64(x).to_le_bytes().to_vec());
        let of = |how, all: [f64; 4]| {
            let all = f16s(all);
            let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
            reduce(ElementType::F16, how, &all).map(|x| f16::from_le_bytes([x[0], x[1]]).to_f64())
        };
        assert_eq!(of(Reduce::Sum, [1.0, 2.0, 3.0, 0.0]), Some(6.0));
        assert_eq!(of(Reduce::Sum, [2048.0, 1.0, 0.0, 0.0]), None, "2049 has 12 digits");
        assert_eq!(of(Reduce::Sum, [2046.0, 2.0, 0.0, 0.0]), Some(2048.0));
        assert_eq!(of(Reduce::Average, [1.0, 2.0, 0.0, 0.0]), Some(0.75));
        assert_eq!(of(Reduce::Product, [3.0, 0.0, 5.0, 0.25]), Some(0.0));
        assert_eq!(of(Reduce::Product, [2047.0, 3.0, 0.0, 1.0]), None, "a product on the way");
        assert_eq!(of(Reduce::Largest, [1.0, 9.0, 2.0, 0.5]), Some(9.0));
        let none: [&[u8]; 2] = [&[], &[]];
        assert_eq!(reduce(ElementType::I32, Reduce::Average, &none), None);
        let one: [&[u8]; 2] = [&[200], &[100]];
        assert_eq!(reduce(ElementType::U8, Reduce::Sum, &one), Some(vec![44]));
    }
}
