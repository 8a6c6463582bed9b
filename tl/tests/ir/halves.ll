; A loop as a compiler with a bug emits it: the temporary %half is released twice, around the creation of %product. The right
; answers are 0.5, 0.25, 0.125; without quarantine the second release hits %product. Returns the number of wrong answers.
declare void @tl_mem_enter_scope()
declare void @tl_mem_exit_scope()
declare void @tl_mem_promote(ptr)
declare void @tl_tensor_release(ptr)
declare ptr @lh_tensor_create(ptr, i64, i8)
declare ptr @lh_tensor_data(ptr)
declare i64 @tl_get_scope_depth()
declare i64 @tl_get_refcount_count()

@shape = private constant [1 x i64] [i64 1]

define i32 @main() {
entry:
  call void @tl_mem_enter_scope()
  %x0 = call ptr @lh_tensor_create(ptr @shape, i64 1, i8 1)
  %d0 = call ptr @lh_tensor_data(ptr %x0)
  store double 1.0, ptr %d0
  br label %loop

loop:
  %i = phi i32 [ 0, %entry ], [ %i1, %next ]
  %x = phi ptr [ %x0, %entry ], [ %product, %next ]
  %want = phi double [ 0.5, %entry ], [ %want1, %next ]
  %bad = phi i32 [ 0, %entry ], [ %bad1, %next ]
  call void @tl_mem_enter_scope()
  %half = call ptr @lh_tensor_create(ptr @shape, i64 1, i8 1)
  %hd = call ptr @lh_tensor_data(ptr %half)
  store double 0.5, ptr %hd
  %h = load double, ptr %hd
  call void @tl_tensor_release(ptr %half)
  %product = call ptr @lh_tensor_create(ptr @shape, i64 1, i8 1)
  %xd = call ptr @lh_tensor_data(ptr %x)
  %xv = load double, ptr %xd
  %p = fmul double %xv, %h
  %pd = call ptr @lh_tensor_data(ptr %product)
  store double %p, ptr %pd
  call void @tl_tensor_release(ptr %half)
  %rd = call ptr @lh_tensor_data(ptr %product)
  %gone = icmp eq ptr %rd, null
  br i1 %gone, label %lost, label %check

lost:
  br label %next

check:
  %r = load double, ptr %rd
  %ok = fcmp oeq double %r, %want
  %wrong = select i1 %ok, i32 0, i32 1
  br label %next

next:
  %add = phi i32 [ 1, %lost ], [ %wrong, %check ]
  %bad1 = add i32 %bad, %add
  %want1 = fmul double %want, 0.5
  call void @tl_mem_promote(ptr %product)
  call void @tl_mem_exit_scope()
  %i1 = add i32 %i, 1
  ; Once an answer is lost the next turn would read null.
  %stop = icmp sgt i32 %bad1, 0
  %done = icmp sge i32 %i1, 3
  %end = or i1 %stop, %done
  br i1 %end, label %out, label %loop

out:
  call void @tl_mem_exit_scope()
  %depth = call i64 @tl_get_scope_depth()
  %deep = icmp ne i64 %depth, 1
  %live = call i64 @tl_get_refcount_count()
  %leak = icmp ne i64 %live, 0
  %either = or i1 %deep, %leak
  %more = zext i1 %either to i32
  %result = add i32 %bad1, %more
  ret i32 %result
}
