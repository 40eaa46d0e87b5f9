#pragma once
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <functional>
#include <algorithm>
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
using std::min; using std::max;
struct Warp { uint32_t in[32][12]; uint32_t snap[2][32][12]; int arrived=0; uint64_t gen=0; };
struct Mbar { int init=0,pending=0,tx=0,phase=0; };
struct EBlock { std::vector<char> mem; std::vector<Warp> warps; int bcount[16]={}; uint64_t bgen[16]={}; Mbar mb[8]; uint32_t mbase=0; int rank; std::vector<EBlock*>* cluster; dim3 idx; };
struct Fiber { ucontext_t ctx; EBlock* b; unsigned tid; bool done=false; int cl_arrived=0; std::vector<char> stack; std::function<void()> f; };
extern Fiber* cur; extern ucontext_t sched; extern long progress; extern dim3 e_grid, e_bdim; extern int cl_count, cl_need;
inline void e_yield(){ swapcontext(&cur->ctx,&sched); }
#define E_WAIT(c) do{ while(!(c)) e_yield(); ++progress; }while(0)
#define __noinline__
inline float __fdividef(float a,float b){return a/b;}
struct ETid{ unsigned x; };
#define threadIdx (ETid{cur->tid})
#define blockIdx (cur->b->idx)
#define gridDim e_grid
#define blockDim e_bdim
inline Warp& e_warp(){ return cur->b->warps[cur->tid/32]; }
inline uint32_t (*e_all(uint32_t const* v,int n))[12]{ Warp&w=e_warp(); int l=cur->tid%32; memcpy(w.in[l],v,4*n); uint64_t g=w.gen; ++progress;
  if(++w.arrived==32){ memcpy(w.snap[g%2],w.in,sizeof(w.in)); w.arrived=0; ++w.gen; } else E_WAIT(w.gen!=g); return w.snap[g%2]; }
inline void __syncwarp(unsigned=~0u){ uint32_t v=0; e_all(&v,1); }
template<class T> T e_shfl(T x,int src){ uint32_t v; memcpy(&v,&x,4); auto s=e_all(&v,1); T r; memcpy(&r,s[src],4); return r; }
template<class T> T __shfl_sync(unsigned,T x,int s,int w=32){ int l=cur->tid%32; return e_shfl(x,(l/w)*w+(s%w)); }
template<class T> T __shfl_xor_sync(unsigned,T x,int m,int w=32){ int l=cur->tid%32; return e_shfl(x,l^m); }
template<class T> T __shfl_up_sync(unsigned,T x,int d,int w=32){ int l=cur->tid%32; return e_shfl(x, l%w>=d? l-d:l); }
template<class T> T __shfl_down_sync(unsigned,T x,int d,int w=32){ int l=cur->tid%32; return e_shfl(x, l%w+d<w? l+d:l); }
inline uint32_t e_fu(float x){uint32_t r;memcpy(&r,&x,4);return r;} inline float e_uf(uint32_t x){float r;memcpy(&r,&x,4);return r;}
#define __float_as_uint e_fu
#define __uint_as_float e_uf
inline float rsqrtf(float x){ return 1.f/std::sqrt(x); }
inline void e_bar(int id,int n,bool wait){ EBlock*b=cur->b; uint64_t g=b->bgen[id]; ++progress; if(++b->bcount[id]==n){ b->bcount[id]=0; ++b->bgen[id]; } else if(wait) E_WAIT(b->bgen[id]!=g); if(b->bcount[id]>n){puts("barrier overrun");abort();} }
namespace dflash {
inline uint32_t shared_address(void const*p){ return uint32_t((char const*)p-cur->b->mem.data()); }
inline void commit_copies(){} template<int> inline void wait_for_copies(){}
inline Mbar& e_mb(EBlock*b,uint32_t a){ if(b->mbase==0) b->mbase=a; uint32_t i=(a-b->mbase)/8; if(i>=8)abort(); return b->mb[i]; }
inline void e_chk(Mbar&m){ if(m.pending==0&&m.tx==0){ m.phase^=1; m.pending=m.init; } }
inline void init_barrier(uint32_t a,int n){ Mbar&m=e_mb(cur->b,a); m.init=m.pending=n; }
inline void fence_barrier_inits(){}
inline void expect_bytes(uint32_t a,int n){ Mbar&m=e_mb(cur->b,a); m.tx+=n; m.pending--; e_chk(m); ++progress; }
inline void wait_for_phase(uint32_t a,uint32_t p){ Mbar&m=e_mb(cur->b,a); E_WAIT(uint32_t(m.phase)!=p); }
inline void arrive_at_cluster(){ ++cl_count; } inline void wait_for_cluster(){ E_WAIT(cl_count>=cl_need); }
inline uint32_t address_at(uint32_t a,int r){ return uint32_t(r)<<24|a; }
template<int n> inline void send(uint32_t to,float const(&x)[n],uint32_t bar){ EBlock*b=(*cur->b->cluster)[to>>24]; memcpy(b->mem.data()+(to&0xffffff),x,4*n); Mbar&m=e_mb(b,bar&0xffffff); m.tx-=4*n; e_chk(m); ++progress; }
inline void trigger(){} inline void wait(){}
inline float e_tf(uint32_t x){ return e_uf(x&0xffffe000u); }
inline void e_mma(float(&c)[4],uint32_t const(&a)[4],uint32_t b0,uint32_t b1){ uint32_t v[6]={a[0],a[1],a[2],a[3],b0,b1}; auto s=e_all(v,6); int l=cur->tid%32,g=l/4,t=l%4;
  for(int i=0;i<4;++i){ int row=g+8*(i/2), col=2*t+i%2; double sum=c[i]; for(int k=0;k<8;++k){ int al=(row%8)*4+k%4; int ar=(row/8)+2*(k/4); int bl=col*4+k%4; sum+=double(e_tf(s[al][ar]))*double(e_tf(s[bl][4+k/4])); } c[i]=float(sum);} }
}
