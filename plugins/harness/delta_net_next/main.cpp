#include "emu.h"
#include "delta_net_block.cuh"
#include "kernel.inc"
#include <random>
Fiber* cur; ucontext_t sched; long progress; dim3 e_grid,e_bdim; int cl_count,cl_need;
static void entry(){ cur->f(); cur->done=true; ++progress; swapcontext(&cur->ctx,&sched); }
template<class T,int K,int V> void launch(dflash_delta_net_params const&p){
  using D=dflash::delta::Division<T,K,V>; int bytes=dflash::delta::Shared<T,K,V>::kBytes;
  e_grid=dim3(p.value_heads*D::kSplits,p.segment_count); e_bdim=dim3(D::kThreads);
  static std::vector<Fiber> fs; fs.resize(D::kSplits*D::kThreads);
  for(unsigned y=0;y<e_grid.y;++y) for(int head=0;head<p.value_heads;++head){
    std::vector<EBlock> bs(D::kSplits); std::vector<EBlock*> ptr; for(auto&b:bs) ptr.push_back(&b);
    cl_count=0; cl_need=D::kSplits*D::kThreads;
    for(int r=0;r<D::kSplits;++r){ auto&b=bs[r]; b.mem.resize(bytes+64,char(0x7f)); std::fill(b.mem.begin(),b.mem.end(),char(0xff)); b.warps.resize(D::kThreads/32); b.rank=r; b.cluster=&ptr; b.idx=dim3(head*D::kSplits+r,y);
      // 16-byte base
      for(int t=0;t<D::kThreads;++t){ auto&f=fs[r*D::kThreads+t]; f.b=&b; f.tid=t; f.done=false; if(f.stack.empty()) f.stack.resize(128<<10); f.f=[&p]{ dflash::delta_net_kernel<T,K,V>(p); };
        getcontext(&f.ctx); f.ctx.uc_stack.ss_sp=f.stack.data(); f.ctx.uc_stack.ss_size=f.stack.size(); f.ctx.uc_link=nullptr; makecontext(&f.ctx,entry,0);} }
    bool all=false; static unsigned turn=0; int stuck=0; while(!all){ all=true; long before=progress; ++turn; size_t n=fs.size();
      for(size_t i=0;i<n;++i){ auto&f=fs[(turn%2? i : n-1-i)]; if(!f.done){ all=false; cur=&f; swapcontext(&sched,&f.ctx);} }
      if(!all&&progress==before&&++stuck>3){ printf("DEADLOCK head %d seg %u\n",head,y); for(auto&b:bs) for(int i=0;i<12;++i) if(b.bcount[i]) printf(" block %d bar %d count %d\n",b.rank,i,b.bcount[i]); exit(1);} if(progress!=before) stuck=0; }
    for(auto&b:bs) for(int i=bytes;i<bytes+64;++i) if(b.mem[i]!=char(0xff)){ puts("shared overrun"); exit(1);} } }
template<class T> T from(float x); template<> float from(float x){return x;} template<> __nv_bfloat16 from(float x){return __float2bfloat16_rn(x);}
inline double to(float x){return x;} inline double to(__nv_bfloat16 x){return __bfloat162float(x);}
struct Ref{ int Hk,Hv,K; std::vector<double> S; std::vector<std::vector<double>> win; // [3][C]
  std::vector<std::vector<double>> states; std::vector<std::vector<double>> inputs; };
template<class T,int K,int V> void test(int Hk,int Hv,int pending,char const*name){
  std::mt19937 rng(1); std::normal_distribution<float> nd; int slots=2; int C=(2*Hk+Hv)*K, W=C+Hv*K;
  auto vec=[&](size_t n,float s,float m=0){ std::vector<T> v(n); for(auto&x:v) x=from<T>(m+s*nd(rng)); return v; };
  auto conv=vec(C*4,.5f); std::vector<float> alog(Hv),dt(Hv),norm(K); for(auto&x:alog)x=-3.5f+nd(rng); for(auto&x:dt)x=nd(rng); for(auto&x:norm)x=1+nd(rng)/10;
  std::vector<float> states(size_t(slots)*Hv*K*K,7),writes(size_t(slots)*pending*Hv*K,7),keys(size_t(slots)*pending*Hk*K,7),decays(slots*pending*Hv,7); auto window=vec(size_t(slots)*(3+pending)*C,0,7); std::vector<int> counters(slots*Hk,0),lengths(slots,5);
  std::vector<Ref> ref(slots); for(auto&r:ref){ r.S.assign(size_t(Hv)*K*K,0); r.win.assign(3,std::vector<double>(C,0)); }
  std::vector<int> starts(slots,0);
  int plan[][4]={{16,1,3,1},{5,40,5,40},{16,16,16,9},{1,17,1,17},{16,3,11,1},{1,1,1,1},{19,16,19,2},{16,18,8,18},{12,16,1,1},{1,1,1,1}};
  double wo=0,ws=0; int step=0;
  for(auto&pl:plan){ int n=pl[0]+pl[1]; auto x=vec(size_t(n+2)*W,1), g=vec(size_t(n+2)*2*Hv,1); std::vector<T> out(size_t(n+2)*Hv*K,from<T>(9)); int seg[8]={0,starts[0],0,pl[0],1,starts[1],pl[0],pl[1]};
    dflash_delta_net_params p{}; p.segment_count=2;p.rows=n+2;p.key_heads=Hk;p.value_heads=Hv;p.head_size=K;p.kernel=4;p.pending=pending;p.slots=slots;p.norm_eps=1e-6f;p.segments=seg;p.lengths=lengths.data();p.x=x.data();p.gates=g.data();p.conv=conv.data();p.a_log=alog.data();p.dt_bias=dt.data();p.norm=norm.data();p.states=states.data();p.writes=writes.data();p.keys=keys.data();p.decays=decays.data();p.window=window.data();p.counters=counters.data();p.out=out.data();p.x_row_stride=W;p.gates_row_stride=2*Hv;
    launch<T,K,V>(p);
    for(int c:counters) if(c){ puts("counters"); exit(1);} 
    for(size_t i=size_t(n)*Hv*K;i<out.size();++i) if(to(out[i])!=0){ puts("padding"); exit(1);}
    for(int s=0;s<slots;++s){ auto&r=ref[s]; int cnt=pl[s], first=s?pl[0]:0;
      r.inputs=r.win; for(int t=0;t<cnt;++t){ std::vector<double> row(C); for(int c=0;c<C;++c) row[c]=to(x[size_t(first+t)*W+c]); r.inputs.push_back(row);} r.states.assign(1,r.S);
      for(int t=0;t<cnt;++t){ std::vector<double> y(C); for(int c=0;c<C;++c){ double a=0; for(int i=0;i<4;++i) a+=to(conv[c*4+i])*r.inputs[t+i][c]; y[c]=a/(1+exp(-a)); }
        auto S=r.states.back();
        for(int h=0;h<Hv;++h){ int kh=h/(Hv/Hk); double nq=1e-6,nk=1e-6; for(int k=0;k<K;++k){ nq+=y[kh*K+k]*y[kh*K+k]; nk+=y[(Hk+kh)*K+k]*y[(Hk+kh)*K+k]; }
          double b=1/(1+exp(-to(g[size_t(first+t)*2*Hv+h]))), a=to(g[size_t(first+t)*2*Hv+Hv+h])+dt[h]; double d=exp(-exp(double(alog[h]))*log1p(exp(a)));
          std::vector<double> o(K); double sq=0; for(int v=0;v<K;++v){ double*row=&S[(size_t(h)*K+v)*K]; double kv=0; for(int k=0;k<K;++k){ row[k]*=d; kv+=row[k]*y[(Hk+kh)*K+k]/sqrt(nk);} double u=b*(y[2*Hk*K+h*K+v]-kv); double q=0; for(int k=0;k<K;++k){ row[k]+=u*y[(Hk+kh)*K+k]/sqrt(nk); q+=row[k]*y[kh*K+k]/sqrt(nq)/sqrt(double(K)); } o[v]=q; sq+=q*q; }
          double num=0,den=0; for(int v=0;v<K;++v){ double z=to(x[size_t(first+t)*W+C+h*K+v]); double e=o[v]/sqrt(sq/K+1e-6)*norm[v]*z/(1+exp(-z)); double f=to(out[size_t(first+t)*Hv*K+h*K+v]); num+=(e-f)*(e-f); den+=e*e; } double err=sqrt(num/den); if(!(err<=wo)) wo=err; if(!(err<(sizeof(T)==4?2e-5:6e-3))) printf("%s step %d slot %d row %d head %d err %.2e\n",name,step,s,t,h,err); }
        r.states.push_back(S); }
      int keep=pl[2+s]; 
      { r.S=r.states[keep]; std::vector<std::vector<double>> w(r.inputs.begin()+keep,r.inputs.begin()+keep+3); r.win=w; }
      lengths[s]=starts[s]+std::max(cnt-pending,0); starts[s]+=keep; }
    // states: where they stand: before pending rows; check those whose state equals length
    ++step; }
  // absorb what is pending by a step of one row, then compare
  { auto x=vec(size_t(2)*W,1), g=vec(size_t(2)*2*Hv,1); std::vector<T> out(size_t(2)*Hv*K); int seg[8]={0,starts[0],0,1,1,starts[1],1,1};
    dflash_delta_net_params p{}; p.segment_count=2;p.rows=2;p.key_heads=Hk;p.value_heads=Hv;p.head_size=K;p.kernel=4;p.pending=pending;p.slots=slots;p.norm_eps=1e-6f;p.segments=seg;p.lengths=lengths.data();p.x=x.data();p.gates=g.data();p.conv=conv.data();p.a_log=alog.data();p.dt_bias=dt.data();p.norm=norm.data();p.states=states.data();p.writes=writes.data();p.keys=keys.data();p.decays=decays.data();p.window=window.data();p.counters=counters.data();p.out=out.data();p.x_row_stride=W;p.gates_row_stride=2*Hv; launch<T,K,V>(p);
    for(int s=0;s<slots;++s){ double num=0,den=0; for(size_t i=0;i<size_t(Hv)*K*K;++i){ double e=ref[s].S[i],f=states[size_t(s)*Hv*K*K+i]; num+=(e-f)*(e-f); den+=e*e; } double err=sqrt(num/den); if(!(err<=ws)) ws=err; } }
  printf("%s: worst row %.2e, states %.2e\n",name,wo,ws); fflush(stdout);
}
int main(int c,char**v){ int w=c>1?atoi(v[1]):-1;
  if(w<0||w==0) test<float,16,16>(2,2,16,"fp32 16/16");
  if(w<0||w==1) test<float,32,32>(1,2,16,"fp32 32/32");
  if(w<0||w==2) test<float,64,32>(1,2,16,"fp32 64/32");
  if(w<0||w==3) test<__nv_bfloat16,128,128>(1,1,16,"bf16 128/128");
  if(w<0||w==4) test<__nv_bfloat16,128,32>(1,1,16,"bf16 128/32");
  if(w<0||w==5) test<__nv_bfloat16,128,64>(1,1,16,"bf16 128/64");
  if(w<0||w==6) test<float,128,32>(1,2,16,"fp32 128/32");
  if(w<0||w==7) test<float,128,128>(1,2,16,"fp32 128/128");
}
